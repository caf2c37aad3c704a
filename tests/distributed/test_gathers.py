"""Under FSDP2, ranks that gather other units of equal size would compute with a mixture of weights (failure mode 12).

One sample then moved the sum by 2.5 R, without a contribution of its own.
"""

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.distributed.launch import together

UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
CASES = ("units", *["one unit"] * UNUSED)


def test_all_ranks_refuse_gathers_of_other_units_and_may_start_afresh() -> None:
    for before, message, after in together("gathers_worker.py", 2, *CASES)["units"]:
        assert (before, after) == ("", "")
        assert "Ranks gathered different FSDP units" in message


@pytest.mark.skipif(not UNUSED, reason="ranks must use equal parameters")
def test_ranks_may_use_different_layers_of_one_unit() -> None:
    for messages in together("gathers_worker.py", 2, *CASES)["one unit"]:
        assert messages == ["", "", ""]


@pytest.mark.exhaustive
@pytest.mark.skipif(not UNUSED, reason="ranks must use equal parameters")
def test_replicas_gather_by_themselves() -> None:
    for messages in together("gathers_worker.py", 4, "replicas")["replicas"]:
        assert messages == ["", "", ""]
