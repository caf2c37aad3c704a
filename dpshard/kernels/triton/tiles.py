"""Sizes of tiles, which depend only on the sizes of products."""

from __future__ import annotations

SMALLEST = 16
"""Least positions, rows or columns for tensor cores."""

MANY = 128
"""Number of programs that keep a GPU busy, roughly."""

LONGEST = 2**14
"""Most elements that one program reads from a row, unless there are MANY programs. Torch is faster with longer rows."""


def ghost_tile(BG: int, T: int) -> int:
    """Return the positions on a side of a tile: large ones read memory less often, small ones are MANY."""
    size = tile(T, 128 if T >= 256 else 64)
    while size > SMALLEST and BG * triangle(T, size) < MANY:
        size //= 2
    return size


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
