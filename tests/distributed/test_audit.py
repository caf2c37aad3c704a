"""The two-distribution audit of a sharded engine: sound it passes, with noise divided by the ranks it is refuted.

Failure modes: 14.

The run secret is fixed; under a random one a sound engine would be refuted with probability 1e-6.
"""

import pytest

from tests.distributed.launch import launch
from tests.extras import needs_deepspeed


@pytest.mark.parametrize("backend", ["ddp", "fsdp2", pytest.param("deepspeed-3", marks=needs_deepspeed)])
def test_an_audit_is_shown_what_one_process_would_release_and_train(backend):
    for ((error, trials),) in launch("audit_worker.py", 2, "0", backend):
        assert error < 1e-6
        assert trials == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("trials", "backends"),
    [
        (400, ["ddp"]),
        (400, ["fsdp2"]),
        pytest.param(300, ["deepspeed-2", "deepspeed-3"], marks=needs_deepspeed),
    ],
    ids=["ddp", "fsdp2", "deepspeed"],
)
def test_noise_that_is_divided_by_the_world_size_is_refuted(trials, backends):
    ranks = launch("audit_worker.py", 2, str(trials), *backends)
    assert ranks[0] == ranks[1]
    assert len(ranks[0]) == len(backends)
    for error, ((sound, mu), (weak, mu_of_weak)) in ranks[0]:
        assert error < 1e-6
        assert not sound
        assert weak
        assert 1.3 < mu < 2 < mu_of_weak
