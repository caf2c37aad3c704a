"""Triton kernels for GPUs; docs/kernels.md lists them. Each has a reference in PyTorch, for all other cases.

[Note: Kernels]
Tensor cores multiply the original half-precision numbers, exactly, with float32 sums.

Tiles write partial sums without atomic additions, so their rounding is always the same. Only the digest adds
atomically: integers wrap around, so every order gives the same sum. Each of the K / 16 additions in a sum of K products
may drop its last bit. Together, this is below K 2^-27 of the sum. So Gram matrices, with rows as long as a vocabulary,
are summed in chunks of 1024.

Kernels need compute capability 8.0 or more. Triton's interpreter (TRITON_INTERPRET=1) runs them on CPU tensors.
DPSHARD_TRITON=0 switches them off.
"""

from dpshard.kernels.triton.dispatch import (
    run_on,
    supports_digest,
    supports_ghost_norm,
    supports_product,
    supports_row_norms,
    supports_rows,
)
from dpshard.kernels.triton.operators import (
    add_digests_,
    ghost_norm_sq,
    gradient_norm_sq,
    per_sample,
    release_,
    row_norm_sq,
    weighted_rows,
    weighted_sum,
)
from dpshard.kernels.triton.tiles import ghost_tile
