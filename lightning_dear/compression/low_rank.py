"""Low rank: two thin matrices travel instead of each weight's gradient (PowerSGD)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_dear.compression.codec import Compressor, Kind, Setting


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Compressor):
    """Sends the mean gradient M [n, m] of each weight as P Q^T, P [n, r] and Q [m, r].

    One step of power iteration from the last step's Q, on the mean of all ranks (Vogels et al.
    2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
    algorithm 1):

        P = mean of M Q,  P orthonormal,  Q = mean of M^T P,  C(M) = P Q^T

    So C(M) = P P^T M, a projection, where M is the mean itself: |C(M) - M| <= |M| (norms of all
    elements), and C(M) = M once Q spans the rows of an M of rank r or less. That holds as long as
    |M| is an fp32 number, since the elements of P and Q may be as large. Where any of a bucket's
    numbers is so large that some |M| might be none, it counts as inf.

    Both means are all-reduces, of P in backward and of Q after it, so that every rank has the whole
    mean gradient and all optimizer state; nothing is gathered. A tensor of more than two dimensions
    is a matrix of the first one, in the order of its storage, and all others. Vectors, and matrices
    of which it would save too little, travel as they are, among the numbers of P. Each rank factors
    P and multiplies for itself: bits are equal on all ranks where their linear algebra gives equal
    bits for equal input.

    Args:
        rank: r, at least 1; at most the smaller dimension of a matrix counts.
        min_saving: A matrix goes as it is unless n m >= min_saving (n + m) r; at least 1.
        error_feedback: See `Compressor`.
    """

    name: ClassVar[str] = "powersgd"
    kind: ClassVar[Kind] = "contractive"
    all_reduces: ClassVar[bool] = True
    overflows: ClassVar[str] = " Numbers whose products might overflow count as inf."

    rank: int = 4
    min_saving: float = 2.0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("rank")
        if not self.min_saving >= 1:
            raise ValueError(
                f"min_saving of powersgd must be at least 1, got {self.min_saving!r}: below, more"
                " would travel than without it."
            )

    @override
    def check_with(self, setting: Setting) -> None:
        whole = "gives every rank the whole mean gradient, which gather='parameters' has no use for"
        self._check_gathers_gradients(setting, whole)

    def rank_of(self, num_rows: int, num_columns: int) -> int:
        """Returns R of a matrix of this shape; 0 if it goes as it is."""
        rank = min(self.rank, num_rows, num_columns)
        saves = num_rows * num_columns >= self.min_saving * (num_rows + num_columns) * rank
        return rank if saves else 0


def starting_factor(shape: torch.Size, seed: int) -> Tensor:
    """Returns a random orthonormal Q [m, r], the same for the same seed on all ranks."""
    # On the CPU, since other devices draw other numbers from the same seed.
    generator = Generator().manual_seed(seed)
    return orthonormal(torch.randn(shape, dtype=torch.float32, generator=generator))


def orthonormal(factor: Tensor) -> Tensor:
    """Returns an orthonormal basis of the columns of `factor` [n, r], r <= n; finite for zeros."""
    # Not Gram-Schmidt, as in the paper: that divides by norms, which may be 0.
    basis: Tensor = torch.linalg.qr(factor)[0]
    # LAPACK stores columns, and checkpoints view factors as flat.
    return basis.contiguous()
