"""Half precision ends where clipping begins: norms, clipped sums, their reduction and the noise are float32.

PITFALLS row 10. The network computes exactly in half precision (small integers), so the clipped sum is known in
float64; a sum that was rounded to bfloat16 on its way would be off by 4e-3, to float16 by 5e-4.
"""

import pytest

from tests.distributed.launch import launch

HALVES = ("bfloat16", "float16")


def cases(*backends_and_halves: str) -> list[str]:
    return [
        f"{x}:{style}:{dtype}" for x in backends_and_halves for style in ("all-layer", "layer-wise") for dtype in HALVES
    ]


@pytest.mark.parametrize("world_size", [1, 2])
def test_half_precision_forwards_leave_the_clipped_sum_exact(world_size: int) -> None:
    asked = cases("ddp:autocast", "fsdp2:autocast", "fsdp2:policy", "fsdp2:policy-narrow")
    for results in launch("precision_worker.py", world_size, *asked):
        assert sorted(results) == sorted(asked)
        for case, result in results.items():
            assert result["error"] <= 1e-6, (case, result)
            assert result["dtypes"] == ["torch.float32"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_half_precision_parameters_see_one_rounding(world_size: int) -> None:
    """Their `.grad` has their dtype, so the private gradient is rounded to it: once, at the very end."""
    asked = cases("ddp:parameters", "fsdp2:parameters")
    for results in launch("precision_worker.py", world_size, *asked):
        assert sorted(results) == sorted(asked)
        for case, result in results.items():
            assert result["roundings"] <= 1.01, (case, result)
