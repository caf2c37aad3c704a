"""Box and Muller's normals, and their addition to a sum, in compiled code or numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpshard.kernels.native import reference
from dpshard.kernels.native.library import library, team


def box_muller(words: NDArray[np.int32], normals: NDArray[Any], scratch: NDArray[Any]) -> None:
    """Fill `normals` [units, 2, n], float32 or float64, from random `words` [units, 3 or 4, n].

    After Box and Muller 1958. The radius of a pair takes 31 bits of each of two words; the angle takes one word, or two
    in float64. Each unit of `words`, and `normals`, are contiguous. May overwrite `words` and `scratch` [3 or 4, units,
    n], of the dtype of the normals.
    """
    compiled = library()
    if compiled is None:
        reference.box_muller(words, normals, scratch)
    else:
        compiled.normals(words, normals, team())


def release_(x: NDArray[Any], noise: NDArray[Any], std: float, divisor: float) -> None:
    """Replace `x` [n] by (x + std * noise) / divisor in place; a wider `noise` makes it round once.

    Both arrays are contiguous, float32 or float64, and `noise` is not narrower than `x`. May overwrite `noise`.
    """
    compiled = library()
    if compiled is None:
        reference.release_(x, noise, std, divisor)
    else:
        compiled.release_(x, noise, std, divisor, team())
