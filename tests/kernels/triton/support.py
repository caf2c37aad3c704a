"""Where the kernels are tested: on the GPU if there is one, else in Triton's interpreter.

The interpreter is chosen when Triton is imported, so it has a process of its own: see test_interpreter.py.
"""

import pytest
import torch

from dpshard.kernels import triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def skip_without_kernels() -> None:
    """Skip the module that asks."""
    if not triton.run_on(DEVICE):
        pytest.skip("no GPU: test_interpreter.py runs these in Triton's interpreter", allow_module_level=True)
