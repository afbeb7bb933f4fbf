"""PowerSGD: two thin matrices are sent in place of each weight's gradient."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from typing_extensions import override

from lightning_dear.compression.codec import Compressor, Kind, Setting


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Compressor):
    """Sends the mean gradient M [n, m] of each weight as P Q^T, with P [n, r] and Q [m, r].

    Each step makes one step of power iteration on the mean gradient of all ranks, from the Q of the
    step before (Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", algorithm 1):

        P = mean of M Q,  P orthonormal,  Q = mean of M^T P,  C(M) = P Q^T

    C(M) = P P^T M is a projection of M: |C(M) - M| <= |M| (norms of all elements), and C(M) = M
    once Q spans the rows of an M of rank r or less. Elements of P and Q may be as large as the norm
    |M|, which therefore must not overflow in fp32. So a gradient counts as inf from a magnitude on
    at which the norm of a matrix in its bucket could overflow.

    Both means are computed by all-reduces: that of P in backward, and that of Q afterwards. So
    every rank has the whole mean gradient and the whole optimizer state, and nothing is gathered. A
    tensor of more than two dimensions is taken as a matrix whose rows are its first dimension (in
    the order of storage), and whose columns are all other dimensions. Vectors, and matrices that
    would not become enough smaller (see `min_saving`), are sent uncompressed together with P. Each
    rank computes the basis P and the products itself. The results are equal on all ranks only if
    the ranks' linear algebra gives equal bits for equal input.

    Args:
        rank: r, at least 1, limited to the smaller dimension of each matrix. The default is 4.
        min_saving: A matrix is sent uncompressed unless n m >= min_saving (n + m) r. At least 1.
            The default is 2.
        error_feedback: See `Compressor`.

    Raises:
        ValueError: If an option is out of its range.
    """

    name: ClassVar[str] = "powersgd"
    kind: ClassVar[Kind] = "contractive"
    all_reduces: ClassVar[bool] = True
    overflows: ClassVar[str] = " Values whose products might overflow count as inf, too."

    rank: int = 4
    min_saving: float = 2.0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("rank")
        if not self.min_saving >= 1:
            raise ValueError(
                f"min_saving of powersgd must be at least 1, got {self.min_saving!r}: with less, P"
                " and Q would be larger than the matrix."
            )

    @override
    def check_with(self, setting: Setting) -> None:
        reason = "It gives every rank the whole mean gradient, and sends no parameters."
        self._check_gathers_gradients(setting, reason)

    def rank_of(self, num_rows: int, num_columns: int) -> int:
        """Returns r for a matrix of this shape. 0 means that the matrix is sent uncompressed."""
        rank = min(self.rank, num_rows, num_columns)
        saves = num_rows * num_columns >= self.min_saving * (num_rows + num_columns) * rank
        return rank if saves else 0


def starting_factor(shape: torch.Size, seed: int) -> Tensor:
    """Returns a random orthonormal Q, with which power iteration begins.

    Args:
        shape: [m, r].
        seed: Seed. Ranks that pass the same seed get the same Q.

    Returns:
        [m, r] fp32, on the CPU.
    """
    # Drawn on the CPU, since other devices draw other numbers from the same seed.
    generator = Generator().manual_seed(seed)
    return orthonormal(torch.randn(shape, dtype=torch.float32, generator=generator))


def orthonormal(factor: Tensor) -> Tensor:
    """Returns r orthonormal columns that span all columns of `factor`, even if some are 0.

    Args:
        factor: [n, r] with r <= n; not mutated.

    Returns:
        [n, r], contiguous.
    """
    # Computed by QR, since the paper's Gram-Schmidt divides by norms, which may be 0.
    basis: Tensor = torch.linalg.qr(factor)[0]
    # LAPACK returns column-major matrices. Checkpoints view factors as flat tensors, row by row.
    return basis.contiguous()
