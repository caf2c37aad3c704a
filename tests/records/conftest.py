"""Every test of records starts from one seed."""

import torch


def pytest_runtest_setup():
    torch.manual_seed(0)
