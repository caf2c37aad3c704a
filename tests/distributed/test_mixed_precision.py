"""Half precision ends where clipping begins: norms, clipped sums, their reduction and the noise are float32.

Failure mode 10. The network computes exactly in half precision (small integers), so the clipped sum is known in
float64; a sum that was rounded to bfloat16 on its way would be off by 4e-3, to float16 by 5e-4.
"""

import pytest

from tests.distributed.launch import together
from tests.grids import quick

STYLES = ("all-layer:bfloat16", "all-layer:float16", "layer-wise:bfloat16")


EXACT = ("ddp:autocast", "fsdp2:autocast", "fsdp2:policy", "fsdp2:policy-narrow")
ROUNDED = ("ddp:parameters", "fsdp2:parameters")
CASES = {kinds: [f"{kind}:{style}" for kind in kinds for style in STYLES] for kinds in (EXACT, ROUNDED)}


@pytest.mark.parametrize("world_size", quick(2, rest=[1]))
@pytest.mark.parametrize("case", CASES[EXACT])
def test_half_precision_forwards_leave_the_clipped_sum_exact(case: str, world_size: int) -> None:
    for result in together("precision_worker.py", world_size, *CASES[EXACT], *CASES[ROUNDED])[case]:
        assert result["error"] <= 1e-6
        assert result["dtypes"] == ["torch.float32"]


@pytest.mark.parametrize("world_size", quick(2, rest=[1]))
@pytest.mark.parametrize("case", CASES[ROUNDED])
def test_half_precision_parameters_see_one_rounding(case: str, world_size: int) -> None:
    """Their `.grad` has their dtype, so the private gradient is rounded to it: once, at the very end."""
    for result in together("precision_worker.py", world_size, *CASES[EXACT], *CASES[ROUNDED])[case]:
        assert result["roundings"] <= 1.01
