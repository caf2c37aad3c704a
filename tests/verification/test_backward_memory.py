"""NaN in the gradients of one pass alone is a difference.

Failure modes: 8 test_a_gradient_that_only_one_pass_makes_nan_differs.
"""

import torch

from dpshard.verification.backward_memory import _After, _differ
from dpshard.verification.count_sketch import Sketch


def after(*values):
    return _After({}, [], {"w": Sketch.of(torch.tensor(values, dtype=torch.float64))})


def test_a_gradient_that_only_one_pass_makes_nan_differs():
    clean, spoilt = after(1.0, 2.0), after(1.0, float("nan"))
    assert _differ(clean, spoilt, 1e-6, half=False)
    assert _differ(spoilt, clean, 1e-6, half=False)
    assert not _differ(spoilt, spoilt, 1e-6, half=False)
    assert not _differ(clean, after(1.0, 2.0 + 1e-9), 1e-6, half=False)
    assert _differ(clean, after(1.0, 2.1), 1e-6, half=False)
