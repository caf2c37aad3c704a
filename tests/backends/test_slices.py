"""Where the ranks of one model lie in a flattened mesh, over which FSDP shards.

Failure mode 15: a slice in the wrong place would be another element's sum, with this element's noise.
"""

import pytest

from dpshard.backends.slices import crossing

EIGHT = list(range(8))


@pytest.mark.parametrize(
    ("model", "places"),
    [
        ([2, 3], [[0, 2, 4, 6], [1, 3, 5, 7]]),  # a mesh (4, model)
        ([1, 5], [[0, 1, 2, 3], [4, 5, 6, 7]]),  # (model, 4)
        ([5, 7], [[0, 1, 4, 5], [2, 3, 6, 7]]),  # (2, model, 2)
        ([4, 5, 6, 7], [[0, 4], [1, 5], [2, 6], [3, 7]]),  # (2, model)
    ],
)
def test_ranks_of_a_model_are_evenly_spaced(model: list[int], places: list[list[int]]) -> None:
    assert crossing(EIGHT, model) == places
    assert crossing([10 + rank for rank in EIGHT], [10 + rank for rank in model]) == places


@pytest.mark.parametrize("model", [[0, 3], [1, 2], [3, 2], [0, 1, 2], [0, 1, 3, 4]])
def test_other_ranks_are_no_mesh(model: list[int]) -> None:
    assert crossing(EIGHT, model) is None


def test_ranks_in_another_order_are_refused() -> None:
    assert crossing([1, 0, 3, 2], [0, 1]) is None
