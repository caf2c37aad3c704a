"""Whole private steps on fake CUDA tensors: no mixed devices, nothing waits for the GPU, few launches.

A fake tensor has a device, a shape and a dtype, and no numbers; operators on two devices raise. The worker has its own
process, because its torch takes the machine for one with a GPU. These steps do not reach NCCL, streams or kernels.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.fake_cuda import device
from tests.grids import quick

ROOT = Path(__file__).parents[2]
CASES = ["gpt:all-layer:ghost:bf16:1", "gpt:all-layer:bk:bf16:1:offload", "images:all-layer:auto:fp32"]
MORE = ["recurrent:param-wise:ghost:fp32", "encoder:block-wise:bk:bf16", "bags:all-layer:per-example:fp32"]
BLOCKS = {
    "gpt:all-layer:auto:bf16": 1.12,
    "gpt:layer-wise:auto:bf16": 1.38,
    "wide:all-layer:auto:bf16": 1.16,
    "wide:layer-wise:auto:bf16": 1.48,
    "gpt:all-layer:ghost:bf16": 1.61,
    "G1:all-layer:auto:bf16": 1.2,
    "G1:layer-wise:auto:bf16": 1.52,
    "G2:all-layer:auto:bf16": 1.21,
    "G2:layer-wise:auto:bf16": 1.48,
    "G2:all-layer:ghost:bf16": 1.72,
    "G3:all-layer:auto:bf16": 1.15,
    "G3:layer-wise:auto:bf16": 1.39,
}
"""Most launches that a block adds, over those that it adds to an ordinary step; of small layers, of large ones,
and of the models of `make gpu`. Two passes (ghost) have two backwards."""
ONCE = "records/numerics.py:index_tensor copies"
"""Real tensors copy these numbers only in the first step; the cache must not keep fake ones."""
SENT = "interception/rows/identity.py:<listcomp> sends"
"""Padding rows are compared with the batch that was handed out; these copies do not block."""
MOVED = "records/offload/copies.py:leave copies", "records/offload/copies.py:begin_return copies"
"""Offloaded records leave and return on streams."""
RELEASE = {
    "backends/guard.py:refuse_rewritten tolist": 1,
    "backends/backend.py:complete_sums copies": 1,
    "noise/keyed.py:_release_with_device_noise_ copies": 1,
}
"""A release reads the digest of the sums, which keys their noise; at later waits the device is idle."""
RELEASE_LAUNCHES = 165
"""Most launches of a release with the optimizer's step, for any number of parameters."""
METRICS = 3

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="compiles a device guard"),
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a torch built for CUDA refuses another CUDA device"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return device.build(tmp_path_factory.mktemp("guard"))


def steps(library, cases):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DPSHARD_TRITON": "1"}
    command = [sys.executable, "-m", "tests.fake_cuda.worker", str(library), *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-6000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def own(waits):
    return {key: n for key, n in waits.items() if not key.startswith("the script") and key != ONCE}


def require_no_waits(case, found):
    assert sum(found["private"]["launches"].values()) > 1.2 * sum(found["ordinary"]["launches"].values()), case
    added = [key for key in found["private"]["launches"] if key.endswith(("index_add_", "scatter_add_"))]
    assert not [key for key in added if key.startswith("records")], (case, added)  # atomics do not repeat
    assert found["anchors"][0] > 0
    assert found["anchors"][1] == 0  # without a gradient, no event between the streams of taps and anchors
    trained, released = own(found["private"]["waits"]), own(found["release"]["waits"])
    moved = [trained.pop(key, 0) for key in MOVED]
    assert min(moved) == max(moved) > 0 if case.endswith("offload") else not any(moved), (case, moved)
    assert trained.keys() <= {SENT}, (case, trained)
    assert not Counter(released) - Counter(RELEASE), (case, released)
    assert sum(own(found["metrics"]["waits"]).values()) <= METRICS, (case, found["metrics"]["waits"])
    released = found["release"]["launches"]
    assert sum(released.values()) <= RELEASE_LAUNCHES, (case, released)
    for kernel in (
        "noise/digest.py:_of_whole add_digests_",
        "noise/keyed.py:_release_with_device_noise_ release_",
    ):
        assert released[kernel] == 1, (case, released)


@pytest.mark.parametrize("cases", quick(CASES[1:2], rest=[CASES[::2], MORE]), ids=" ".join)
def test_nothing_waits_for_the_gpu_before_the_release(library, cases):
    for case, found in steps(library, cases).items():
        require_no_waits(case, found)


@pytest.mark.exhaustive
def test_a_block_takes_few_more_launches_than_without_privacy(library):
    every = steps(library, [f"{case}:{depth}" for case in BLOCKS for depth in (1, 2)])
    for case, most in BLOCKS.items():
        shallow, deep = (every[f"{case}:{depth}"] for depth in (1, 2))
        require_no_waits(case, deep)
        plain, clipped = (Counter(deep[kind]["launches"]) for kind in ("ordinary", "private"))
        plain.subtract(shallow["ordinary"]["launches"])
        clipped.subtract(shallow["private"]["launches"])
        assert plain.total() > 60  # the counter sees backward, too
        assert clipped.total() <= most * plain.total(), (case, clipped.most_common(30))
