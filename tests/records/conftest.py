"""Every test of a record starts from the same seed."""

import torch


def pytest_runtest_setup():
    torch.manual_seed(0)
