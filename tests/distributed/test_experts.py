"""Experts on several ranks, by the samples of all or of the same ranks, give the update of one process.

Failure modes: 2 (one norm and one factor for a sample, whatever ranks its rows visit); 8 (what a rank's own rows and
rows from afar both meet is refused); 9 (an expert without rows); 12 (a capacity that rows of other ranks use up); 14
and 15 (noise of each expert is its own).
"""

import pytest

from tests.distributed.launch import shared

EXACT = (
    *("samples:all-layer:auto", "samples:layer-wise:auto+verified", "samples:block-wise:auto+checkpointed"),
    *("samples:all-layer:mixed-ghost", "sequence:layer-wise:auto+verified", "whole:all-layer:auto+verified"),
    "whole:layer-wise:auto+columns",
)
ON_FOUR = (
    *("samples:layer-wise:ghost", "samples:block-wise:auto+checkpointed"),
    *("sequence:all-layer:auto+verified", "sequence:layer-wise:ghost", "whole:block-wise:auto"),
    "whole:all-layer:auto+verified+columns",
)
FAULTS = (
    *("samples:all-layer:auto+own norms", "samples:all-layer:auto+factors of another"),
    "samples:all-layer:auto+summed twice",
)
REFUSED = {
    "samples:all-layer:auto+verified+full": "VerificationError: An output on this rank moves when the inputs of other",
    "samples:all-layer:auto+verified+own norms": "VerificationError: ",
    "samples:all-layer:auto+nearby": "UnsupportedParameterError: blocks.0.mixture.experts.norm",
    "samples:all-layer:auto+local": "UnsupportedParameterError: unbind(blocks.0.mixture.experts.up",
    "samples:all-layer:auto+centred": "ConfigurationError: The forward of the model calls c10d.allreduce_",
    "samples:all-layer:auto+reduced": "ConfigurationError: blocks.0.mixture.experts.up: DistributedDataParallel must",
}

ITEMS = [
    *(pytest.param(2, case) for case in EXACT),
    *(pytest.param(4, case, marks=pytest.mark.exhaustive) for case in ON_FOUR),
]
found = shared("experts_worker.py", ITEMS, lambda world_size, case: (world_size, case), size=6)


@pytest.mark.parametrize(("world_size", "case"), ITEMS)
def test_experts_on_several_ranks_change_no_update(world_size: int, case: str) -> None:
    for result in found(world_size, case):
        assert result["error"] <= 1e-12
        parted, alone = result["metrics"]
        assert parted == pytest.approx(alone, rel=1e-12)
        assert 0 < parted["clip_fraction"] < 1
        assert result["epsilon"][0] == result["epsilon"][1]


OTHERS = [pytest.param(case) for case in (*FAULTS, *REFUSED, "samples:all-layer:auto+digested")]
found_other = shared("experts_worker.py", OTHERS, lambda case: (2, case), size=10)


@pytest.mark.parametrize("case", FAULTS)
@pytest.mark.exhaustive
def test_faults_of_norms_factors_and_sums_show(case: str) -> None:
    """Each of them is planted; without it the error is below 1e-12."""
    for result in found_other(case):
        assert result["error"] > 1e-3


@pytest.mark.parametrize("case", REFUSED)
def test_what_mixes_samples_or_ranks_is_refused(case: str) -> None:
    """What only the rows of one rank show is refused by all."""
    messages = [result["refused"] for result in found_other(case)]
    assert any(message.startswith(REFUSED[case]) for message in messages)
    assert len({message.partition(":")[0] for message in messages}) == 1


def test_replicas_stay_equal_if_noise_depends_on_the_sums() -> None:
    for result in found_other("samples:all-layer:auto+digested"):
        assert result["equal"]
