"""Opacus's data-parallel wrapper; here it is torch's own."""

from torch.nn.parallel import DistributedDataParallel as DifferentiallyPrivateDistributedDataParallel

__all__ = ["DifferentiallyPrivateDistributedDataParallel"]
