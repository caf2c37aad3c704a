"""Sizes of tiles, which depend only on the sizes of products."""

from __future__ import annotations

SMALLEST = 16
"""Least positions, rows or columns for tensor cores."""

MANY = 128
"""Number of programs that keep a GPU busy, roughly. With fewer tiles, torch is faster."""

LONGEST = 2**14
"""Most elements of a row for the kernel of norms, in which one program takes a row."""


def ghost_tile(BG: int, T: int) -> int:
    """Return the positions on a side of a tile. With large tiles, memory is read less often."""
    return 128 if T >= 256 and BG * triangle(T, 128) >= MANY else tile(T, 64)


def triangle(T: int, tile: int) -> int:
    """Count the tiles of a symmetric matrix [T, T] on and below the diagonal."""
    n = -(-T // tile)
    return n * (n + 1) // 2


def gradient_tile(BG: int, R: int, C: int) -> tuple[int, int]:
    """Return the rows and columns of a tile of BG gradients [R, C]."""
    largest = 128 if BG * -(-R // 128) * -(-C // 128) >= MANY else 64
    return tile(R, largest), tile(C, largest)


def tile(n: int, most: int) -> int:
    """Return the least power of two that covers n, between 16 and `most`."""
    return min(most, max(SMALLEST, 1 << (n - 1).bit_length()))
