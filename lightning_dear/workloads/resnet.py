"""A small residual network with batch normalisation, for small images."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F


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
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, in_channels, h, w) to (batch, out_channels, h / stride, w / stride)."""
        hidden = F.relu(self.norm1(self.conv1(images)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


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
            raise ValueError(f"channels must name at least one positive width, got {channels}.")
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}.")
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
        hidden = self.blocks(F.relu(self.norm(self.stem(images))))
        logits: Tensor = self.head(hidden.mean(dim=(2, 3)))
        return logits
