"""The two-distribution audit of a sharded engine: sound it passes, with noise divided by the ranks it is refuted.

PITFALLS rows: 14.

The run secret is fixed; under a random one a sound engine would be refuted with probability 1e-6.
"""

import pytest

from tests.distributed.launch import launch


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_noise_that_is_divided_by_the_world_size_is_refuted(backend):
    ranks = launch("audit_worker.py", 2, backend)
    assert ranks[0] == ranks[1]
    (sound, mu), (weak, mu_of_weak) = ranks[0]
    assert not sound
    assert weak
    assert 1.4 < mu < 2 < mu_of_weak
