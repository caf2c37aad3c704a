"""Keyed Gaussian noise for a local shard: a function of the global element, whoever holds it.

[Note: Noise by the global element]
A parameter, flattened as if it were whole, is cut into blocks of BLOCK elements, and block k has a key of its own:
derive_key(secret, "noise", step, name, k). A rank adds the range of elements that it holds and draws the blocks that
meet it, no others. By construction then
- shards of one parameter are independent, and replicas of one shard equal, whatever the mesh;
- the noisy update is the same on 1, 2 or 256 ranks;
- a step that is replayed after a crash, on however many ranks, releases the same value again and costs nothing more.
The last holds on one kind of device. The CPU, a GPU, and GPUs with different numbers of multiprocessors (PyTorch lays
its random numbers out by them) draw different normals from one key; `secure` noise is drawn on the CPU and is the
same everywhere. (Between CPUs the last bit of a logarithm or a cosine may differ.)

[Note: Secure noise]
Which floats a sampler can give, and which it cannot, may tell what they were added to: Mironov 2012, "On significance
of the least significant bits for differential privacy"; Jin et al. 2022, "Are we there yet? Timing and floating-point
attacks on differential privacy systems", arXiv:2112.05307, who do it to Box and Muller's method and to DP-SGD. Holohan
and Braghin 2021, "Secure random sampling in differential privacy", arXiv:2107.10138, make the noise a sum of n
independent normals over sqrt(n): it has the same distribution, but to find out whether a float can be such a sum one
has to search the random bits of all n, of which the cost grows exponentially with n. (The cosine and the sine of one
draw must not be two of them: their sum is one cosine again.) `secure` noise is such a sum of SUMMANDS normals, each
under a key of its own. It is made and added in float64, and rounded to the dtype of the sum once, after the addition:
what has the 24 bits of a float32 shows nothing of the 53 of the noise. With float64 parameters the search is all that
protects. The time that noise takes depends on the number of elements alone: nothing is rejected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpshard.errors import ConfigurationError
from dpshard.randomness import RandomSource, derive_key

BLOCK = 2**20
"""Elements under one key. Part of the meaning of a run secret: another size is other noise."""

SUMMANDS = 4
"""Normals whose sum is one of secure noise; see [Note: Secure noise]. Part of the meaning of a run secret."""

_NUMPY_DTYPE = {torch.float32: np.float32, torch.float64: np.float64}


@dataclass(frozen=True)
class KeyedGaussian:
    """Gaussian noise of a run; see [Note: Noise by the global element]."""

    secret: bytes = field(repr=False)
    """Run secret, 32 bytes."""
    secure: bool = False
    """Draw on the CPU for every device, as [Note: Secure noise] says."""

    def add_(self, target: Tensor, *, step: int, name: str, std: float, start: int = 0) -> Tensor:
        """Add N(0, std**2) noise to `target` in place and return it; std = 0 draws and adds nothing.

        `target` is a rank's local shard, of any shape and strides, float32 or float64. Read row by row it holds the
        elements [start, start + target.numel()) of the flattened whole parameter `name`; its noise has its dtype.
        Raises ConfigurationError for another dtype, a sharded tensor, or a std that is negative or not finite.
        """
        _check(target, name, std, start)
        if std == 0 or target.numel() == 0:
            return target
        if not target.is_contiguous():
            dense = target.detach().contiguous()
            target.detach().copy_(self.add_(dense, step=step, name=name, std=std, start=start))
            return target
        flat, stop = target.detach().view(-1), start + target.numel()

        def add_block(block: int) -> None:
            origin = block * BLOCK
            lo, hi = max(start, origin), min(stop, origin + BLOCK)
            key = derive_key(self.secret, "noise", step, name, block)
            part = flat[lo - start : hi - start]
            for at, noise in self._draw(key, lo - origin, hi - origin, target.dtype, target.device):
                place = part[at : at + len(noise)]
                # Rounded once, behind the addition: secure noise is wider than the sum may be.
                place.copy_(noise.mul_(std).add_(place)) if self.secure else place.add_(noise, alpha=std)

        blocks = range(start // BLOCK, -(-stop // BLOCK))
        # numpy and torch release the interpreter lock. torch's own number of threads is the share of the machine that
        # this rank was given (torchrun sets it to 1).
        threads = min(len(blocks), torch.get_num_threads()) if target.device.type == "cpu" else 1
        if threads == 1:
            for block in blocks:
                add_block(block)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(add_block, blocks))  # list(): an exception in a thread is raised here
        return target

    def sample(
        self,
        step: int,
        name: str,
        start: int,
        stop: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Standard normal noise [stop - start] of the elements [start, stop) of parameter `name` at `step`."""
        if stop < start:
            raise ConfigurationError(f"{name}: a range of elements [{start}, {stop}) ends before it begins.")
        return self.add_(
            torch.zeros(stop - start, dtype=dtype, device=device), step=step, name=name, std=1.0, start=start
        )

    def _draw(
        self, key: bytes, lo: int, hi: int, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[int, Tensor]]:
        """Elements [lo, hi) of the block under `key`, in pieces: where in the range a piece starts, and the piece."""
        if not self.secure and device.type != "cpu":
            generator = torch.Generator(device).manual_seed(int.from_bytes(key[:8], "little"))
            # The whole block: the first values of a shorter draw on a GPU would be others.
            yield 0, torch.randn(BLOCK, generator=generator, dtype=dtype, device=device)[lo:hi]
            return
        at = 0
        # Nothing is drawn past `hi`.
        for normals in _sums(key, hi) if self.secure else RandomSource(key).normals(hi, _NUMPY_DTYPE[dtype]):
            if at + len(normals) > lo:
                yield max(0, at - lo), torch.from_numpy(normals[max(0, lo - at) :]).to(device)
            at += len(normals)


def _sums(key: bytes, n: int) -> Iterator[NDArray[np.float64]]:
    """`n` standard normals in pieces, each a sum of SUMMANDS independent ones; a piece is overwritten by the next."""
    sources = [RandomSource(derive_key(key, "summand", i)).normals(n, np.float64) for i in range(SUMMANDS)]
    for first, *others in zip(*sources, strict=True):
        for other in others:
            first += other
        first *= SUMMANDS**-0.5
        yield first


def _check(target: Tensor, name: str, std: float, start: int) -> None:
    if target.dtype not in _NUMPY_DTYPE:
        raise ConfigurationError(
            f"{name}: noise for a tensor of {target.dtype} would lose its low bits, and with them the guarantee. "
            f"Accumulate the clipped sum in float32 and add the noise there."
        )
    if hasattr(target, "to_local"):
        raise ConfigurationError(f"{name}: noise is added to the local shard: pass target.to_local(), and its start.")
    if not math.isfinite(std) or std < 0:
        raise ConfigurationError(f"{name}: std={std!r} of the noise must be finite and at least 0.")
    if start < 0:
        raise ConfigurationError(f"{name}: start={start} is the first element of the shard, at least 0.")
