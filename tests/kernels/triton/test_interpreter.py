"""The tests of the kernels on CPU tensors, in Triton's interpreter."""

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest

from tests.grids import quick

HERE = Path(__file__).parent


def _release(text):
    return tuple(map(int, text.split(".")[:2]))


WORKS = find_spec("triton") is None or _release(version("triton")) >= (3, 7) or _release(numpy.__version__) < (2, 4)
REST = ["test_digest.py", "test_products.py", "test_rows.py", "test_training.py", "test_self_test.py"]


@pytest.mark.parametrize("tests", quick("test_gaussian.py", rest=REST))
@pytest.mark.skipif(find_spec("triton") is None, reason="pip install dpshard[triton]")
@pytest.mark.skipif(not WORKS, reason="the interpreter of Triton 3.6 fails with NumPy 2.4")
@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="this is the interpreter")
def test_the_kernels_in_tritons_interpreter(tests):
    name, *chosen = tests.split()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / name, *chosen]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("DPSHARD_TRITON", None)
    done = subprocess.run(command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
