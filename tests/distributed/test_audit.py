"""The two-distribution audit of a sharded engine: sound it passes, with noise divided by the ranks it is refuted.

Failure modes: 14.

The run secret is fixed; under a random one a sound engine would be refuted with probability 1e-6.
"""

import pytest

from tests.distributed.launch import shared, together
from tests.extras import needs_deepspeed

BACKENDS = [
    *(pytest.param(backend) for backend in ("ddp", "fsdp2")),
    *(pytest.param(f"deepspeed-{stage}", marks=needs_deepspeed) for stage in (2, 3)),
]
found = shared("audit_worker.py", BACKENDS, lambda backend: (2, f"0:{backend}"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_audit_is_shown_what_one_process_would_release_and_train(backend):
    for error, trials in found(backend):
        assert error < 1e-6
        assert trials == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", [BACKENDS[1], BACKENDS[3]])
def test_noise_that_is_divided_by_the_world_size_is_refuted(backend):
    case = f"200:{backend}"
    first, second = together("audit_worker.py", 2, case)[case]
    assert first == second
    error, ((sound, mu), (weak, mu_of_weak)) = first
    assert error < 1e-6
    assert not sound
    assert weak
    assert 1.3 < mu < 2 < mu_of_weak
