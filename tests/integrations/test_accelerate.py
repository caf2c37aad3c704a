"""accelerate: plain, DDP and FSDP2 give the parameters of the plain engine, noise included, and go on from a state.

Failure modes: 14, 15, 17 test_parameters_are_those_of_the_plain_engine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine
from dpshard.errors import ConfigurationError
from tests.distributed.launch import launch
from tests.integrations.accelerate_setup import DATA, SETTINGS, mlp
from tests.sums import taken_for_equal

accelerate = pytest.importorskip("accelerate")

from dpshard.integrations.accelerate import make_engine  # noqa: E402

WORKER = Path(__file__).with_name("accelerate_worker.py")


def reported(ranks: int, *arguments: str) -> list:
    """Return the worker's output; a single process is not a rank."""
    if ranks > 1:
        return launch(WORKER, ranks, *arguments, timeout=200)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[2])}
    command = [sys.executable, str(WORKER), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    line = next((line for line in run.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert line is not None, run.stdout[-2000:] + run.stderr[-6000:]
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.parametrize(
    ("kind", "ranks", "name"),
    [("plain", 1, "Sequential"), ("ddp", 2, "DistributedDataParallel"), ("fsdp2", 2, "FSDPSequential")],
)
def test_parameters_are_those_of_the_plain_engine(kind, ranks, name, tmp_path):
    plain = mlp()
    engine = PrivacyEngine(plain, **SETTINGS)
    state = json.dumps(engine.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    with taken_for_equal():
        for logical_batch in engine.batches(TensorDataset(*DATA), 5):
            for x, y in logical_batch:
                F.cross_entropy(plain(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    wrapped, steps, found = reported(ranks, kind, str(tmp_path), state)
    assert (wrapped, steps) == (name, 4)
    for values, parameter in zip(found, plain.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(values, dtype=torch.float64), parameter.detach().flatten())


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("gradient_accumulation_steps", 2, "divides losses"),
        ("mixed_precision", "fp16", "scales losses"),
        ("distributed_type", accelerate.DistributedType.DEEPSPEED, "DEEPSPEED is not supported"),
        ("parallelism_config", accelerate.ParallelismConfig(cp_size=2, dp_shard_size=2), "cp_size=2, sp_size=1"),
        ("parallelism_config", accelerate.ParallelismConfig(tp_size=2), "tp_size=2, cp_size=1"),
    ],
)
def test_what_is_not_private_is_refused(attribute, value, message):
    class Settings:
        gradient_accumulation_steps = 1
        parallelism_config = accelerate.ParallelismConfig(dp_shard_size=2)
        mixed_precision = "no"
        distributed_type = accelerate.DistributedType.NO

    setattr(Settings, attribute, value)
    with pytest.raises(ConfigurationError, match=message):
        make_engine(Settings(), mlp(), **SETTINGS)
