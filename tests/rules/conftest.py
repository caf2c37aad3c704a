"""Every test of a rule starts from the same seed."""

import torch


def pytest_runtest_setup():
    torch.manual_seed(0)
