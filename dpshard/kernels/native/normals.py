"""Box and Muller's normals, and their addition to a sum, in compiled code or numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpshard.kernels.native import reference
from dpshard.kernels.native.library import library, team


def box_muller(words: NDArray[np.int32], normals: NDArray[Any], scratch: NDArray[Any]) -> None:
    """Fill `normals` [units, 2, n], float32 or float64, from random `words` [units, 3 or 4, n].

    After Box and Muller 1958. A pair of normals takes its radius from 31 bits of each of two words.
    It takes its angle from one word, or from two in float64. Each unit of `words` and all of
    `normals` are contiguous. The function may overwrite `words`, and uses `scratch` [3 or 4, units,
    n], of the dtype of the normals, as scratch memory.
    """
    compiled = library()
    if compiled is None:
        reference.box_muller(words, normals, scratch)
    else:
        compiled.normals(words, normals, team())


def release_(x: NDArray[Any], noise: NDArray[Any], std: float, divisor: float) -> None:
    """Replace `x` [n] by (x + std * noise) / divisor in place; round the sum with wider noise once.

    Both arrays are contiguous, float32 or float64, and `noise` is not narrower than `x`. The
    function may overwrite `noise`.
    """
    compiled = library()
    if compiled is None:
        reference.release_(x, noise, std, divisor)
    else:
        compiled.release_(x, noise, std, divisor, team())
