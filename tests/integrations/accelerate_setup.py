"""Shared parts of the test of accelerate and its worker."""

import torch
from torch import nn

N, D, C = 40, 6, 3
torch.manual_seed(0)
DATA = torch.randn(N, D, dtype=torch.float64), torch.arange(N) % C
SETTINGS = {"batch_size": 8, "sample_size": N, "steps": 4, "noise_multiplier": 1.0, "max_grad_norm": 0.7}


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Linear(7, C)).double()
