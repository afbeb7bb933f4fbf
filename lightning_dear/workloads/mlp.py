"""A plain stack of linear layers: much to send for little to compute."""

from __future__ import annotations

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU between them.

    Args:
        in_features: Numbers of one sample, whatever its shape.
        num_classes: Logits.
        width: Features of every hidden layer.
        num_hidden: Hidden layers, at least 1.
    """

    def __init__(self, in_features: int, num_classes: int, width: int, num_hidden: int) -> None:
        super().__init__()
        if num_hidden < 1:
            raise ValueError(f"num_hidden must be at least 1, got {num_hidden}.")
        widths = [in_features, *[width] * num_hidden]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(before, after), nn.ReLU())
            for before, after in zip(widths, widths[1:], strict=False)
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, samples: Tensor) -> Tensor:
        """Return logits of shape (N, num_classes) for samples of shape (N, ...)."""
        features = samples.flatten(1)
        for block in self.blocks:
            features = block(features)
        logits: Tensor = self.head(features)
        return logits
