"""Exact integers from the discrete Gaussian distribution, by random bits and integer arithmetic.

An integer y has probability proportional to exp(-y^2 / (2 s^2)), here with s = 2^24 (Canonne et al. 2020,
arXiv:2004.00010). Rejection samples it in array order (Karney 2016, arXiv:1303.6257, Algorithm D):
1. |y| = k h + j, with a cell k of width h = s / 16 and a place j < h. Draw cells with probabilities proportional to
   exp(-(k h)^2 / (2 s^2)), and the distribution function C. It is cell k if a uniform U of infinitely many bits lies
   between C(k - 1) and C(k). 64 bits of U decide, unless they equal those of a C(k).
2. j is uniform: the lowest bits of a word; its highest bit is the sign.
3. Accept with probability exp(-a), a = (|y|^2 - (k h)^2) / (2 s^2) = j (2 k h + j) / (2 s^2). Refuse negative zeros,
   because 0 would come twice as often.

For 0 <= a < 1, toss coins of probability a, a / 2, a / 3, ... until one fails. The number of successes is even with
probability 1 - a + a^2/2! - ... = exp(-a) (Canonne et al., Algorithm 1). For a = n / 2^m, such a coin needs m random
bits below n, and one of i equal chances.

[Note: Overflow]
Cells that 64 bits decide are below 152, since exp(-152^2 / 512) < 2^-64. So a < (2 k + 1) / 512 < 1, and j (2 k h + j)
< 2 s^2 = 2^49. Python's integers decide about other candidates.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cache

import numpy as np
from numpy.typing import NDArray

from dpshard.noise import LOG2_STD
from dpshard.randomness import RandomSource

WORD = 64
"""Bits of U drawn at once."""

_LOOKUP = 12
"""Bits of U that determine most cells."""


@dataclass(frozen=True, slots=True)
class DiscreteGaussian:
    """The distribution, cut into cells."""

    log2_std: int = LOG2_STD
    """Log2 of s, at most 30."""
    log2_cells: int = 4
    """Log2 of the cells per s, from 4 to log2_std."""
    word: int = WORD
    """Bits of U that decide in arrays, at most WORD."""

    def sample(self, n: int, source: RandomSource) -> NDArray[np.int64]:
        """Return `n` independent integers, a function of the key of `source` and of `n`."""
        found = [np.empty(0, np.int64)]
        while (missing := n - sum(map(len, found))) > 0:
            found.append(self._accepted(missing + missing // 32 + 64, source))
        return np.concatenate(found)[:n]

    def _accepted(self, n: int, source: RandomSource) -> NDArray[np.int64]:
        uniform, word = source.words(2 * n).reshape(2, n)
        uniform >>= np.uint64(WORD - self.word)
        cell = _cells(uniform, self.log2_cells, self.word)
        place = (word & np.uint64((1 << self._log2_width) - 1)).view(np.int64)
        sign = 1 - 2 * (word >> np.uint64(63)).view(np.int64)
        undecided = np.flatnonzero(cell < 0)
        cell[undecided] = 0
        y = (cell << self._log2_width) + place
        accepted = exp_coins(place * (2 * y - place), 2 * self.log2_std + 1, source)  # 2 k h + j = 2 y - j
        for i in undecided.tolist():
            y[i], accepted[i] = self._candidate(int(uniform[i]), int(place[i]), source)
        accepted &= (y != 0) | (sign > 0)
        y *= sign
        return y[accepted]

    def _candidate(self, uniform: int, place: int, source: RandomSource) -> tuple[int, bool]:
        """Decide a candidate whose cell `uniform`, the first bits of U, leaves open."""
        bits = self.word
        while True:
            uniform, bits = uniform << WORD | int(source.words(1)[0]), bits + WORD
            thresholds = _thresholds(bits, self.log2_cells)
            cell = bisect_left(thresholds, uniform)
            if thresholds[cell] != uniform:
                break
        y = (cell << self._log2_width) + place
        return y, exp_coin(place * (2 * y - place), 2 * self.log2_std + 1, source)

    @property
    def _log2_width(self) -> int:
        return self.log2_std - self.log2_cells


def exp_coins(numerators: NDArray[np.int64], bits: int, source: RandomSource) -> NDArray[np.bool_]:
    """Toss coins [n] of probability exp(-numerators / 2^bits), 0 <= numerators <= 2^bits, bits <= 62."""
    shift = np.uint64(WORD - bits)

    def successes(numerators: NDArray[np.int64]) -> NDArray[np.bool_]:
        return (source.words(len(numerators)) >> shift).view(np.int64) < numerators

    even, number = np.ones(len(numerators), np.bool_), 1
    heads = np.flatnonzero(successes(numerators))
    while len(heads):
        even[heads] = number % 2 == 0
        number += 1
        heads = heads[successes(numerators[heads]) & _one_in(number, len(heads), source)]
    return even


def exp_coin(numerator: int, bits: int, source: RandomSource) -> bool:
    """Toss a coin of probability exp(-numerator / 2^bits), for any non-negative integers."""
    while numerator >> bits:  # exp(-a) is exp(-a / 2) twice
        if not exp_coin(numerator, bits + 1, source):
            return False
        bits += 1
    words, number = -(-bits // WORD), 0
    while int.from_bytes(source.words(words).tobytes(), "little") >> (WORD * words - bits) < numerator:
        number += 1
        if not _one_in(number, 1, source)[0]:
            return number % 2 == 1
    return number % 2 == 0


def _one_in(i: int, n: int, source: RandomSource) -> NDArray[np.bool_]:
    mask = np.uint64((1 << (i - 1).bit_length()) - 1)
    chance = source.words(n) & mask
    while len(again := np.flatnonzero(chance >= i)):
        chance[again] = source.words(len(again)) & mask
    return chance == 0


def _cells(uniform: NDArray[np.uint64], log2_cells: int, word: int) -> NDArray[np.int64]:
    """Return the cells [n] of numbers that begin with the bits `uniform`; -1 if several can."""
    lookup, thresholds = _lookup(log2_cells, word)
    cells = lookup[(uniform >> np.uint64(max(0, word - _LOOKUP))).view(np.int64)]
    unknown = np.flatnonzero(cells < 0)
    rest = uniform[unknown]
    found = np.searchsorted(thresholds, rest)
    cells[unknown] = np.where(thresholds[found] == rest, -1, found)
    return cells


@cache
def _lookup(log2_cells: int, word: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the cells by the first _LOOKUP bits of U, -1 for open ones, and the thresholds."""
    thresholds = _thresholds(word, log2_cells)
    shift = max(0, word - _LOOKUP)
    cells = []
    for first in range(1 << (word - shift)):
        least, most = first << shift, ((first + 1) << shift) - 1
        cell = bisect_left(thresholds, least)
        cells.append(cell if thresholds[cell] > most else -1)
    return np.array(cells, np.int64), np.array(thresholds, np.uint64)


@cache
def _thresholds(bits: int, log2_cells: int) -> list[int]:
    """Return the first `bits` bits of C(0), C(1), ..., up to the first that are all ones.

    U lies in cell k if k of them are below its first bits, and none equals them.
    """
    digits = bits // 3 + 30
    while (thresholds := _certain_thresholds(bits, log2_cells, digits)) is None:
        digits += 30
    return thresholds


def _certain_thresholds(bits: int, log2_cells: int, digits: int) -> list[int] | None:
    """Compute `_thresholds` with `digits` digits; None if the error of their sums may change a bit."""
    with localcontext(prec=digits):
        weights = [Decimal(1)]
        while weights[-1] > Decimal(10) ** -digits:
            weights.append((Decimal(-(len(weights) ** 2)) / 2 / 4**log2_cells).exp())
        # Each weight, sum and quotient is off by at most one in its last digit; the omitted terms are smaller.
        total, error = sum(weights), len(weights) * Decimal(10) ** (2 - digits)
        thresholds, below = [], Decimal(0)
        for weight in weights:
            below += weight
            least, most = (int((below / total + side) * 2**bits) for side in (-error, error))
            if least != most:
                return None
            thresholds.append(least)
            if least == 2**bits - 1:
                return thresholds
    return None
