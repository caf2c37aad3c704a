"""Opacus's data-parallel wrapper: dpshard works with torch's own."""

from torch.nn.parallel import DistributedDataParallel as DifferentiallyPrivateDistributedDataParallel

__all__ = ["DifferentiallyPrivateDistributedDataParallel"]
