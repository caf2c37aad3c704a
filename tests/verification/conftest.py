"""Every verification test starts from one seed."""

import random

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
