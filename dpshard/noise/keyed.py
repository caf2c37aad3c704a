"""Keyed noise for a local shard, Gaussian or discrete Gaussian: a function of the global element.

[Note: Noise by the global element] Block k of a flattened parameter has the key derive_key(secret, "noise", step, name,
k). A rank draws only the blocks that meet its elements. So shards have independent noise and replicas equal noise, on
any mesh. The secret is that of one release ([Note: Equal sums, equal noise] in digest.py). The CPU draws normals from
AES; GPUs draw those of philox.py, except for `secure` noise.

[Note: Vectors drawn again] Correlated noise of step t is z_t + w_1 z_{t-1} + ... . Each z_s is drawn again from the key
of step s. The sum has the dtype of the shard, and float64 for secure noise.

[Note: Secure noise] The floats that a sampler can return may reveal the sum under the noise (docs/threat-model.md).
`secure` noise is a sum of SUMMANDS normals (Holohan and Braghin 2021, arXiv:2107.10138). A test whether a float can be
one takes time exponential in SUMMANDS. Each summand needs its own key: the cosine and the sine of one draw add up to
one cosine. Noise is added in float64, and the result is rounded once.

[Note: Noise on a grid] `KeyedDiscreteGaussian` rounds each element x of the sum to a grid of step g = std / s, s =
2^24. To x / g it adds an integer of the discrete Gaussian with parameter s.
- Rounding to the grid moves x / g by at most 1/2. That of the quotient moves it by at most 2^-6 below LIMIT = 2^48. So
  in d elements, two sums differ by at most R / g + ROUNDING sqrt(d), ROUNDING = 1 + 2^-5 ([Note: The price of a grid]
  in accounting/releases.py). Clamping at LIMIT moves no sums farther apart.
- Doubles add integers exactly up to 2^53; noise beyond that is 2^29 standard deviations long.
- numpy computes the quotient on the CPU, because GPUs multiply by a reciprocal.
- Rejection takes a random number of bits per integer. So each piece of a block has its own key, and is drawn whole.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpshard.config import NoiseName
from dpshard.errors import ConfigurationError
from dpshard.kernels import native, philox, triton
from dpshard.noise import LOG2_STD
from dpshard.noise.discrete_gaussian import DiscreteGaussian
from dpshard.noise.pieces import (
    BlockPart,
    Blocks,
    LongPiece,
    blocks_of,
    by_kind,
    cut,
    dense,
    keys_of_pieces,
    release_short_,
    rests_of,
    select,
)
from dpshard.randomness import RandomSource, derive_each, derive_key, derive_keys

BLOCK = 2**20
"""Elements under one key. A change of this, HEAD, SUMMANDS or the lengths of pieces changes the noise of every run."""

HEAD = 2**11
"""Elements at the head of a block, under their own key."""

SUMMANDS = 4
"""Normals per sum of secure noise; see [Note: Secure noise]."""

LIMIT = 2.0**48
"""Clamp of sums, in grid steps; see [Note: Noise on a grid]."""

SHORTEST_PIECE, LONGEST_PIECE = 2**10, 2**14
"""Elements of the first and the longest pieces of a block of discrete noise."""

_LEAST_NORMAL = float(torch.finfo(torch.float32).tiny)

_LEAST_STD = 2.0 ** (LOG2_STD - 1022)

_NUMPY_DTYPE = {torch.float32: np.float32, torch.float64: np.float64}


class SumShard(NamedTuple):
    """A rank's part of a sum with the shape of a parameter."""

    name: str
    local: Tensor
    """Any shape and strides, float32 or float64; its noise has its dtype."""
    start: int = 0
    """`local` holds the elements [start, start + local.numel()) of the flattened whole."""
    run_length: int = 0
    """If not 0, `local` holds runs of so many elements; run j begins at start + j * stride."""
    stride: int = 0

    @property
    def place(self) -> tuple[str, int, int, int]:
        """Return the name of the sum, and where `local` lies in it."""
        return self.name, self.start, self.run_length, self.stride

    def contiguous(self) -> Iterator[SumShard]:
        """Yield copies of one run each, about a block long, with zeros between the runs."""
        rows = self.local.detach().reshape(-1, self.run_length)
        n = max(1, BLOCK // self.stride)
        for first in range(0, len(rows), n):
            part = rows[first : first + n]
            spread = part.new_zeros((len(part) - 1) * self.stride + self.run_length)
            spread.as_strided(part.shape, (self.stride, 1)).copy_(part)
            yield SumShard(self.name, spread, self.start + first * self.stride)

    def take_back_(self, pieces: Iterable[SumShard]) -> None:
        """Copy the runs of `contiguous` pieces back into `local`."""
        rows = [
            piece.local.as_strided(
                ((len(piece.local) - self.run_length) // self.stride + 1, self.run_length), (self.stride, 1)
            )
            for piece in pieces
        ]
        self.local.detach().copy_(torch.cat(rows).view(self.local.shape))


def require_shards(shards: Iterable[SumShard]) -> None:
    """Raise ConfigurationError unless every shard can get noise."""
    for name, local, start, run, stride in shards:
        if local.dtype not in _NUMPY_DTYPE:
            raise ConfigurationError(
                f"{name}: noise for a tensor of {local.dtype} would lose its low bits, and with them the guarantee. "
                f"Accumulate the clipped sum in float32 and add the noise there."
            )
        if type(local) is not Tensor and hasattr(local, "to_local"):
            raise ConfigurationError(
                f"{name}: noise is added to the local shard: pass target.to_local(), and its start."
            )
        if start < 0:
            raise ConfigurationError(f"{name}: start={start} must be at least 0: it is the first element of the shard.")
        if run and (local.numel() % run or stride < run):
            raise ConfigurationError(
                f"{name}: runs of {run} elements every {stride} must fill its {local.numel()} elements without overlap."
            )


@dataclass(frozen=True)
class KeyedGaussian:
    """Gaussian noise; see [Note: Noise by the global element]."""

    secret: bytes = field(repr=False)
    """Secret of one release, 32 bytes."""
    secure: bool = False
    """Draw on the CPU for every device; see [Note: Secure noise]."""

    def release_(self, shards: Sequence[SumShard], *, step: int, std: float, divisor: float = 1.0) -> Tensor:
        """Turn every shard x into (x + noise) / divisor in place, noise from N(0, std**2); std = 0 draws none.

        Returns the L2 norm of all shards before the noise, [], float64, on the device of the first. Raises
        ConfigurationError, and changes no shard, for a tensor of half precision or a sharded one. It also raises for a
        std that is negative, not finite, or for float32 below 1.2e-38.
        """
        if not math.isfinite(std) or std < 0:
            raise ConfigurationError(f"std={std!r} of the noise must be finite and at least 0.")
        if 0 < std < _LEAST_NORMAL and any(shard.local.dtype is torch.float32 for shard in shards):
            raise ConfigurationError(
                f"std={std!r} of the noise is below {_LEAST_NORMAL:.2g}, so float32 would round it to zero. Choose a "
                f"larger max_grad_norm, and scale the loss by as much if gradients are so small."
            )
        require_shards(shards)
        return self._release_(shards, step, std, divisor)

    def _release_(self, shards: Sequence[SumShard], step: int, std: float, divisor: float) -> Tensor:
        filled = [shard for shard in shards if shard.local.numel()]
        whole = [shard for shard in filled if not shard.run_length]
        squares = [self._release_whole_(whole, step, std, divisor)] if whole else []
        for shard in filled:
            if shard.run_length:
                pieces = list(shard.contiguous())
                squares += [self._release_whole_([piece], step, std, divisor) for piece in pieces]
                shard.take_back_(pieces)
        if not squares:
            return torch.zeros((), dtype=torch.float64, device="cpu")
        first, *others = squares
        return (torch.stack([first, *(x.to(first.device) for x in others)]).sum() if others else first).sqrt()

    def _release_whole_(self, shards: Sequence[SumShard], step: int, std: float, divisor: float) -> Tensor:
        """Release nonempty shards of one run; return their squared norm before the noise, float64 []."""
        names, tensors, starts, *_ = zip(*shards, strict=True)
        devices = [x.device for x in tensors]
        at_hand = {device: std == 0 or self._draws_on_cpu(device) for device in dict.fromkeys(devices)}
        parts = [x if x.is_contiguous() else dense(x) for x in tensors]
        squares = []
        for here in dict.fromkeys(at_hand.values()):
            some = [*range(len(parts))]
            if len(at_hand) > 1:
                some = [i for i in some if at_hand[devices[i]] == here]
            release_ = self._release_with_cpu_noise_ if here else self._release_with_device_noise_
            own = [parts[i] for i in some]
            blocks = blocks_of([names[i] for i in some], [starts[i] for i in some], own, BLOCK)
            squares.append(release_(blocks, own, step, std, divisor))
        for x, part in zip(tensors, parts, strict=True):
            if part is not x:
                x.detach().copy_(part.view(x.shape))
        return torch.stack([square.to(devices[0]) for square in squares]).sum()

    def _release_with_cpu_noise_(
        self, blocks: Blocks, parts: Sequence[Tensor], step: int, std: float, divisor: float
    ) -> Tensor:
        norm_sq = _norm_sq(blocks.parts)
        if std > 0:
            self._release_blocks_(blocks, step, std, divisor)
            # Writes of compiled code and numpy do not raise the version.
            torch.autograd.graph.increment_version(parts)
        else:
            torch._foreach_div_([x.detach() for x in parts], divisor)
        return norm_sq

    def _release_with_device_noise_(
        self, blocks: Blocks, parts: Sequence[Tensor], step: int, std: float, divisor: float
    ) -> Tensor:
        layout, terms = blocks.layout, self._terms(step)
        streams = torch.tensor(
            [[_stream(key) for key in derive_keys(v.secret, ("noise", v.step), layout.endings)] for v in terms],
            dtype=torch.int64,
            device="cpu",
        )  # [terms, blocks, 3]
        firsts = [*itertools.accumulate(layout.counts, initial=0)]
        starts = [layout.spans[at].number * BLOCK + layout.spans[at].lo for at in firsts[:-1]]
        norms: list[Tensor] = []
        for device in dict.fromkeys([x.device for x in parts]):
            own, weights = streams.to(device), _weights_on(device, terms)
            here = [i for i, x in enumerate(parts) if x.device == device]
            by_kernel = [i for i in here if parts[i].dtype == torch.float32] if triton.run_on(device) else []
            if by_kernel:
                xs, places = [parts[i].detach() for i in by_kernel], [(starts[i], firsts[i]) for i in by_kernel]
                norms.append(triton.release_(xs, *zip(*places, strict=True), own, weights, BLOCK, std, divisor).sqrt())
            for i in sorted({*here} - {*by_kernel}):
                x, of_blocks = parts[i].detach().view(-1), own[:, firsts[i] : firsts[i + 1]]
                norms.append(philox.release_(x, of_blocks, weights, BLOCK, starts[i], std, divisor).sqrt())
        return _square_of(norms)

    def _terms(self, step: int) -> Sequence[NoiseTerm]:
        return (NoiseTerm(1.0, self.secret, step),)

    def _keys(self, blocks: Blocks, step: int) -> list[bytes]:
        return derive_keys(self.secret, ("noise", step), blocks.layout.endings)

    def add_(self, target: Tensor, *, step: int, name: str, std: float, start: int = 0) -> Tensor:
        """Add N(0, std**2) noise to `target` in place and return it; see SumShard."""
        self.release_([SumShard(name, target, start)], step=step, std=std)
        return target

    def _release_blocks_(self, blocks: Blocks, step: int, std: float, divisor: float) -> None:
        for some in by_kind(blocks):
            parts, pieces, keys = some.parts, cut(some.layout, HEAD), self._keys(some, step)
            of_pieces = keys_of_pieces(keys, pieces)
            of_pieces = _summands(of_pieces) if self.secure else of_pieces
            wide = self.secure or parts[0].dtype == torch.float64
            release_short_(parts, pieces, of_pieces, std, divisor, wide=wide)
            for piece, key in zip(pieces.long, rests_of([keys[piece.block] for piece in pieces.long]), strict=True):
                elements = parts[piece.block].detach().view(-1)
                self._release_long_(elements[piece.first :], piece, key, std, divisor)

    def _release_long_(self, part: Tensor, piece: LongPiece, key: bytes, std: float, divisor: float) -> None:
        """Release the first elements of `part`, a piece of several stretches of its stream."""
        at, n = 0, piece.end
        for normals in _sums(key, n) if self.secure else _normals(key, n, part.dtype):
            skipped = max(0, piece.lo - at)
            if skipped < len(normals):
                noise, start = normals[skipped:], at + skipped - piece.lo
                self._privatize(part[start : start + len(noise)], noise, std, divisor)
            at += len(normals)

    def _privatize(self, piece: Tensor, noise: NDArray[Any], std: float, divisor: float) -> None:
        """Turn `piece` into (piece + std * noise) / divisor, rounded once. Overwrites `noise`."""
        host = piece.cpu()  # no copy on the CPU; a GPU would round differently
        native.release_(host.numpy(), noise, std, divisor)
        if host is not piece:
            piece.copy_(host)

    def _draws_on_cpu(self, device: torch.device) -> bool:
        return self.secure or device.type == "cpu"


@dataclass(frozen=True)
class KeyedDiscreteGaussian(KeyedGaussian):
    """Discrete Gaussian noise on a grid, drawn by the CPU for every device; see [Note: Noise on a grid]."""

    def release_(self, shards: Sequence[SumShard], *, step: int, std: float, divisor: float = 1.0) -> Tensor:
        """Release as KeyedGaussian does; raise ConfigurationError also for a std whose grid doubles cannot hold."""
        if 0 < std < _LEAST_STD:
            raise ConfigurationError(
                f"std={std!r} of the noise is so small that normal doubles cannot hold its grid of steps "
                f"2^-{LOG2_STD} * std. Scale the loss and max_grad_norm up."
            )
        return super().release_(shards, step=step, std=std, divisor=divisor)

    def _draws_on_cpu(self, device: torch.device) -> bool:
        return True

    def _release_blocks_(self, blocks: Blocks, step: int, std: float, divisor: float) -> None:
        for span, part, key in zip(blocks.layout.spans, blocks.parts, self._keys(blocks, step), strict=True):
            for piece, integers in self._noise(span, part.detach().view(-1), key):
                self._privatize(piece, integers, std, divisor)

    def _noise(self, span: BlockPart, part: Tensor, key: bytes) -> Iterator[tuple[Tensor, NDArray[Any]]]:
        lo, end = span.lo, span.lo + span.n
        start, stop = 0, SHORTEST_PIECE
        while start < end:
            if stop > lo:
                integers = DiscreteGaussian().sample(stop - start, RandomSource(derive_key(key, "piece", start)))
                first = max(start, lo)
                yield part[first - lo : stop - lo], integers[first - start : end - start]
            start, stop = stop, stop + min(stop, LONGEST_PIECE)

    def _privatize(self, piece: Tensor, noise: NDArray[Any], std: float, divisor: float) -> None:
        grid, total = std * 2.0**-LOG2_STD, piece.to("cpu", torch.float64).numpy()
        with np.errstate(over="ignore"):
            steps = total / grid
        np.clip(np.rint(steps, out=steps), -LIMIT, LIMIT, out=steps)
        steps += noise
        steps *= grid
        piece.copy_(torch.from_numpy(steps)).div_(divisor)


@dataclass(frozen=True)
class CorrelatedGaussian(KeyedGaussian):
    """Weighted sum of noise vectors, each under its own key; see [Note: Vectors drawn again]."""

    terms: tuple[NoiseTerm, ...] = ()

    def _terms(self, step: int) -> Sequence[NoiseTerm]:
        return self.terms

    def _release_blocks_(self, blocks: Blocks, step: int, std: float, divisor: float) -> None:
        for alike in by_kind(blocks):
            for some in _groups(alike):
                self._release_some_(some, std, divisor)

    def _release_some_(self, blocks: Blocks, std: float, divisor: float) -> None:
        """Release blocks of one dtype. Its memory does not depend on the number of vectors."""
        sizes = [span.n for span in blocks.layout.spans]
        dtype = torch.float64 if self.secure else blocks.parts[0].dtype
        total = torch.zeros(sum(sizes), dtype=dtype, device="cpu")
        sums = total.split(sizes)
        for term in self.terms:
            noise = KeyedGaussian(term.secret, self.secure)
            noise._release_blocks_(Blocks(blocks.layout, sums), term.step, term.weight, 1.0)
        for part, of_block in zip(blocks.parts, sums, strict=True):
            self._privatize(part.detach().view(-1), of_block.numpy(), std, divisor)


def generator_name(device: torch.device, noise: NoiseName, *, secure: bool) -> str:
    """Return the name of the noise generator on `device`, for display."""
    kind = "discrete Gaussian" if noise == "discrete-gaussian" else "Gaussian"
    if device.type != "cpu" and not secure and noise == "gaussian":
        return f"{kind} from Philox 4x32-10 under 160 bits"
    return f"{kind} from AES-256" + (f", sums of {SUMMANDS}" if secure and noise == "gaussian" else "")


def _sums(key: bytes, n: int) -> Iterator[NDArray[np.float64]]:
    """Yield `n` standard normals in pieces, each a sum of SUMMANDS; the next piece overwrites it."""
    return _summed(RandomSource(summand).normals(n, np.float64) for summand in _summands([key]))


def _summed(sources: Iterable[Iterator[NDArray[np.float64]]]) -> Iterator[NDArray[np.float64]]:
    for first, *others in zip(*sources, strict=True):
        for other in others:
            first += other
        first *= SUMMANDS**-0.5
        yield first


def _normals(key: bytes, n: int, dtype: torch.dtype) -> Iterator[NDArray[Any]]:
    return RandomSource(key).normals(n, _NUMPY_DTYPE[dtype])


def _summands(keys: Sequence[bytes]) -> list[bytes]:
    """Return SUMMANDS keys for each key, one after another."""
    of_summands = [derive_each(keys, "summand", i) for i in range(SUMMANDS)]
    return [summand for some in zip(*of_summands, strict=True) for summand in some]


class NoiseTerm(NamedTuple):
    """Standard normals z of one step, with their weight."""

    weight: float
    secret: bytes
    """Secret of the release that first used them, 32 bytes."""
    step: int


def _weights_on(device: torch.device, terms: Sequence[NoiseTerm]) -> Tensor:
    if len(terms) == 1:
        return torch.ones(1, dtype=torch.float32, device=device)
    return torch.tensor([term.weight for term in terms], dtype=torch.float32, device="cpu").to(device)


def _norm_sq(parts: Sequence[Tensor]) -> Tensor:
    if native.supports_sums(parts):
        return native.norms_sq(parts).sum()
    return _square_of(torch._foreach_norm([part.detach() for part in parts]))


def _square_of(norms: Sequence[Tensor]) -> Tensor:
    dtype = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    return torch.stack([norm.to(norms[0].device, dtype) for norm in norms]).double().square().sum()


def _stream(key: bytes) -> tuple[int, ...]:
    return struct.unpack("<3q", key[:24])


def _groups(blocks: Blocks) -> Iterator[Blocks]:
    """Yield blocks in groups of less than 2 BLOCK elements."""
    group: list[int] = []
    elements = 0
    for i, span in enumerate(blocks.layout.spans):
        group.append(i)
        elements += span.n
        if elements >= BLOCK:
            yield select(blocks, group)
            group, elements = [], 0
    if group:
        yield select(blocks, group)
