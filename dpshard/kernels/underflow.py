"""A bound on the underflow of a sum; every norm includes it.

[Note: Underflow]
In float32, the square of a number below 1e-19 is below `tiny`, the smallest normal number, and loses bits or is zero. A
large factor may make the loss visible: rows of 1e-23 and columns of 1e19 give gradients of 1e-4. Clipping is sound for
any data if no measured norm is below the true one. So every sum of squares or products includes what underflow may
hide. numerics.RESOLUTION covers rounding.

1. *Sums.* A product that underflows is off by less than tiny, and so is each sum that takes it up. Three such errors a
   term are possible, as long sums are sums of sums, and inner products count twice. hidden(n) = 8 n tiny is above them.
2. *Norms.* A measured norm m of a vector x of n elements has |x|^2 <= m^2 + hidden(n). So |x| <= m + sqrt(hidden(n)),
   which `norms` returns. Its square is at least hidden(n), a normal number, so no later square or product is lost.
3. *Ghost norms.* Let A and B be the Gram matrices of T rows and T columns. The squared norm of sum_t r_t (x) c_t is the
   sum of the elements of A * B. Measured is A + E. By 1, every element of E is below hidden(n) in size. So its
   eigenvalues are below T hidden(n) = hidden(T n), and P = E + hidden(T n) I is positive semidefinite. `gram` gives A +
   P, and likewise B + Q. By Schur's product theorem A * Q, P * B and P * Q are positive semidefinite. So the sums of
   their elements are not negative, and sum (A + P) * (B + Q) >= sum A * B. Underflow hides at most hidden(T^2) of the
   sum itself, which is added. The Gram matrix of windows is a sum of submatrices of that of pixels, so it inherits P.
4. *Inner products* of gradients hide at most hidden(n), which is added. No large factor follows.
5. *Overflow.* A square above the largest number makes the norm infinite or NaN, and the sample counts as zero.
6. *Clipped sums.* A row times its factor may be off by less than tiny. The columns that it meets are shorter than 2e19,
   or the norm is infinite. So T positions of R rows change the sum by less than 3e-19 sqrt(R T). A column of one
   element is measured without a square, and may be as large as 3e38. But where T = 1 nothing cancels: flushing makes
   the sum smaller, and rounding changes it by less than 3e-7 sqrt(R). Gradients that were stored for their norm are
   summed directly.
"""

from __future__ import annotations

import torch


def hidden(terms: int, dtype: torch.dtype) -> float:
    """Return a bound on what underflow hides of a sum of `terms` squares or products in `dtype`."""
    return 8 * terms * torch.finfo(dtype).tiny
