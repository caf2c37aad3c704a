"""Speeds of GPUs and networks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpshard.config import is_count, require_choice, require_positive
from dpshard.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Gpu:
    """Data sheet, without sparsity: TFLOP/s, GB/s and GB."""

    bf16: float
    fp32: float
    bandwidth: float
    memory: int


GPUS: dict[str, Gpu] = {
    "a100": Gpu(312, 19.5, 2039, 80),
    "a100-40": Gpu(312, 19.5, 1555, 40),
    "h100": Gpu(989, 67, 3350, 80),
    "h200": Gpu(989, 67, 4800, 141),
    "b200": Gpu(2250, 75, 7700, 180),
}
"""NVIDIA's data sheets, for SXM and HGX."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A cluster; bandwidths are GB/s per GPU."""

    gpu: str = "h100"
    mfu: float = 0.45
    """Share of the peak: 0.35 to 0.55 in published runs."""
    intra: float = 450.0
    """Within a node: NVLink 4."""
    inter: float = 50.0
    """Between nodes: 400 Gbit/s."""
    pcie: float = 50.0
    """To the host: PCIe 5, less overhead."""
    latency: float = 20e-6
    """Seconds for each doubling of ranks."""
    node: int = 8

    def __post_init__(self) -> None:
        require_choice("gpu", self.gpu, list(GPUS))
        for name in ("mfu", "intra", "inter", "pcie"):
            require_positive(name, getattr(self, name))
        if self.mfu > 1:
            raise ConfigurationError(f"mfu={self.mfu!r}: it is a share of the peak, at most 1.")
        if not (isinstance(self.latency, float | int) and 0 <= self.latency < math.inf):
            raise ConfigurationError(f"latency={self.latency!r}: give seconds, at least 0.")
        if not is_count(self.node):
            raise ConfigurationError(f"node={self.node!r}: give the number of GPUs of a node, at least 1.")

    def flops(self, precision: str) -> float:
        """Return operations a second."""
        gpu = GPUS[self.gpu]
        return self.mfu * 1e12 * (gpu.bf16 if precision == "bf16" else gpu.fp32)

    def memory_seconds(self, nbytes: float) -> float:
        """Return the time to move bytes."""
        return nbytes / (GPUS[self.gpu].bandwidth * 1e9)

    def hop_seconds(self, nbytes: float, *, within_node: bool) -> float:
        """Return the time to send bytes."""
        return self.latency + self._sending(nbytes, within_node=within_node)

    def collective_seconds(self, kind: str, nbytes: float, ranks: int, *, within_node: bool) -> float:
        """Return latency * log2(n) + (n - 1) / n * bytes / bandwidth, twice that for an all-reduce.

        A ring (Thakur, Rabenseifner and Gropp 2005) with the latency of a tree.
        """
        if ranks == 1:
            return 0.0
        rounds = 2 if kind == "all-reduce" else 1
        sending = self._sending((ranks - 1) / ranks * nbytes, within_node=within_node)
        return rounds * (self.latency * math.log2(ranks) + sending)

    def _sending(self, nbytes: float, *, within_node: bool) -> float:
        return nbytes / ((self.intra if within_node else self.inter) * 1e9)
