"""Small networks that need no extra: a GPT over bytes, a residual network, linear layers."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, arange, nn

NUM_BYTES = 256


class Attention(nn.Module):
    """Causal self-attention with one fused projection to queries, keys and values."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape. A position sees itself and earlier ones."""
        batch, time, width = hidden.shape
        heads = self.query_key_value(hidden).view(batch, time, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, time, width))
        return output


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with a LayerNorm before and a residual sum."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.mlp_norm = nn.LayerNorm(width)
        widen, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(widen, nn.GELU(approximate="tanh"), narrow)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        output: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return output


class GPT(nn.Module):
    """Predict the next byte from up to ``context_length`` bytes before it.

    Args:
        context_length: Longest input, in bytes.
        width: Features per position; a multiple of ``num_heads``.
        num_layers: Number of blocks.
        num_heads: Attention heads per block.
        std: Standard deviation of the first weights, by default GPT-2's. None means what torch
            chooses, which in a linear layer is 1 / sqrt(3 * inputs).
    """

    def __init__(
        self,
        context_length: int = 128,
        width: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        std: float | None = 0.02,
    ) -> None:
        super().__init__()
        if min(context_length, width, num_layers, num_heads) < 1 or width % num_heads:
            raise ValueError(
                f"context_length={context_length}, width={width}, num_layers={num_layers} and"
                f" num_heads={num_heads} must be positive, and width a multiple of num_heads."
            )
        self.context_length = context_length
        self.byte_embedding = nn.Embedding(NUM_BYTES, width)
        self.position_embedding = nn.Embedding(context_length, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        if std is None:
            return
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        # Each block adds two outputs to the residual stream. Their weights are scaled down so that
        # its variance does not grow with the number of blocks.
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.output.weight", "mlp.2.weight")):
                nn.init.normal_(parameter, std=std / (2 * num_layers) ** 0.5)

    def forward(self, text: Tensor) -> Tensor:
        """Map bytes (batch, time), int64, to logits (batch, time, 256)."""
        if text.shape[1] > self.context_length:
            raise ValueError(
                f"The input has {text.shape[1]} bytes, but context_length={self.context_length}."
                " Shorten the input, or build the model with a larger context_length."
            )
        positions = arange(text.shape[1], device=text.device)
        hidden = self.byte_embedding(text) + self.position_embedding(positions)
        logits: Tensor = self.head(self.final_norm(self.blocks(hidden)))
        return logits


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; halves the image where ``stride`` is 2."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            conv = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(out_channels))

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, in_channels, h, w) to (batch, out_channels, h / stride, w / stride)."""
        hidden = nn.functional.relu(self.norm1(self.conv1(images)))
        return nn.functional.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


class ResNet(nn.Module):
    """A convolutional stem, one stage per entry of ``channels``, and a linear head.

    Args:
        in_channels: Channels of the images: 1 for grey, 3 for colour.
        num_classes: Number of logits.
        channels: Channels of each stage; every stage but the first halves the image.
        num_blocks: Residual blocks in each stage.
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 10,
        channels: Sequence[int] = (32, 64, 128),
        num_blocks: int = 2,
    ) -> None:
        super().__init__()
        if not channels or min(channels) < 1:
            raise ValueError(f"channels={channels} must be one or more widths, all positive.")
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks} is not valid. Choose 1 or more.")
        self.stem = nn.Conv2d(in_channels, channels[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels[0])
        blocks: list[nn.Module] = []
        width = channels[0]
        for stage, next_width in enumerate(channels):
            for block in range(num_blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(ResidualBlock(width, next_width, stride))
                width = next_width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, in_channels, height, width) to logits (batch, num_classes)."""
        hidden = self.blocks(nn.functional.relu(self.norm(self.stem(images))))
        logits: Tensor = self.head(hidden.mean(dim=(2, 3)))
        return logits


class MLP(nn.Module):
    """Linear layers with ReLU between them.

    Args:
        in_features: Number of elements of a sample of any shape.
        num_classes: Number of logits.
        width: Number of features of every hidden layer.
        num_hidden: Number of hidden layers, at least 1.
    """

    def __init__(self, in_features: int, num_classes: int, width: int, num_hidden: int) -> None:
        super().__init__()
        if num_hidden < 1:
            raise ValueError(f"num_hidden={num_hidden} is not valid. Choose 1 or more.")
        widths = [in_features, *[width] * num_hidden]
        blocks = (nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(widths))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, num_classes)

    def forward(self, samples: Tensor) -> Tensor:
        """Return logits of shape (N, num_classes) for samples of shape (N, ...)."""
        logits: Tensor = self.head(self.blocks(samples.flatten(1)))
        return logits
