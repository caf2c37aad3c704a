"""Runs of a flattened tensor as boxes: what DeepSpeed's fragments are saved as."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpshard.backends.deepspeed.flat_shard import Piece, boxes


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_are_the_run_in_its_order(shape, data):
    """Few boxes, too: all but the first dimension are cut twice at most."""
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    length = data.draw(st.integers(0, numel - start))
    whole, found = torch.arange(numel).view(shape), []
    parts = list(boxes(start, length, shape))
    for offsets, sizes in parts:
        box = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        found += box.flatten().tolist()
    assert found == list(range(start, start + length))
    assert len(parts) <= max(1, 2 * len(shape) - 1)


def test_a_piece_is_for_checkpoints_alone():
    """Its shape is that of the whole, so arithmetic with it would be wrong: it is refused."""
    piece = Piece(torch.ones(3), 2, (4, 5))
    assert piece.shape == (4, 5)
    with pytest.raises(NotImplementedError, match=r"supports only torch\.distributed\.checkpoint"):
        piece + 1
