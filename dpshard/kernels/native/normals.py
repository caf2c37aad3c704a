"""Box and Muller's normals, and their release with a sum: by compiled code, or by numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpshard.kernels.native import reference
from dpshard.kernels.native.library import library, team


def box_muller(words: NDArray[np.int32], normals: NDArray[Any], room: NDArray[Any]) -> None:
    """Fill `normals` [units, 2, n], float32 or float64, from random `words` [units, 3 or 4, n]. Box and Muller 1958.

    Of the words of a pair of normals, 31 bits of two make the radius, and one makes the angle, or two in float64. Units
    are contiguous, and `normals` altogether. `words` may be spoilt, and `room` [3 or 4, units, n], of the dtype of the
    normals, is worked in.
    """
    compiled = library()
    if compiled is None:
        reference.box_muller(words, normals, room)
    else:
        compiled.normals(words, normals, team())


def release_(x: NDArray[Any], noise: NDArray[Any], std: float, divisor: float) -> None:
    """Turn `x` [n] into (x + std * noise) / divisor in place; the sum with wider noise is rounded once.

    Both are contiguous, float32 or float64, the noise not narrower; it may be spoilt.
    """
    compiled = library()
    if compiled is None:
        reference.release_(x, noise, std, divisor)
    else:
        compiled.release_(x, noise, std, divisor, team())
