"""The compiled library: signatures, a test of its results, and its threads."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpshard.kernels.native import reference

_INTERFACE = 6
"""Version of the compiled functions' signatures; see dpshard_interface() in library.c."""

_POINTER, _SIZE, _REAL, _FLAG = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_double, ctypes.c_int
_SIZES = ctypes.POINTER(_SIZE)
_Strides, _ProductSizes, _ConvolutionSizes, _NormalizationSizes = _SIZE * 4, _SIZE * 5, _SIZE * 23, _SIZE * 4
_TEAM = (_POINTER, ctypes.c_uint)
_SIGNATURES = {
    "dpshard_normals": (None, (*_TEAM, _POINTER, _SIZE, _POINTER, _SIZE, _SIZE, _FLAG)),
    "dpshard_release": (None, (*_TEAM, _POINTER, _POINTER, _SIZE, _REAL, _REAL, _FLAG, _FLAG)),
    "dpshard_has_tiles": (_FLAG, ()),
    "dpshard_ghost_norms": (_FLAG, (*_TEAM, _POINTER, _SIZES, _POINTER, _SIZES, _SIZES, _REAL, _POINTER)),
    "dpshard_normalization_gradients": (
        None,
        (*_TEAM, _POINTER, _POINTER, _POINTER, _POINTER, _SIZES, _REAL, _FLAG),
    ),
    "dpshard_release_pieces": (None, (*_TEAM, _POINTER, _POINTER, _SIZE, _FLAG, _REAL, _REAL, _FLAG, _FLAG)),
    "dpshard_has_cipher": (_FLAG, ()),
    "dpshard_release_keyed": (None, (*_TEAM, _POINTER, _POINTER, _SIZE, _FLAG, _REAL, _REAL, _FLAG, _FLAG)),
    "dpshard_digests": (None, (*_TEAM, _POINTER, _SIZE, _POINTER, _POINTER)),
    "dpshard_checksums": (None, (*_TEAM, _POINTER, _SIZE, _POINTER)),
    "dpshard_norms_sq": (None, (*_TEAM, _POINTER, _SIZE, _POINTER)),
    "dpshard_convolution_gradients": (_FLAG, (*_TEAM, _POINTER, _POINTER, _POINTER, _POINTER, _SIZES)),
}
"""Return type and argument types."""

Team = tuple[int | None, int]
"""Address of the function that starts threads (None: use one thread), and their number."""

Vectors = tuple[int, Sequence[int]]
"""Address and strides, in elements, of float32 vectors [B, G, T, n]."""

Table = NDArray[np.int64]
"""Rows of addresses and sizes."""


def table(rows: Sequence[Sequence[int]]) -> Table:
    """Return rows of addresses and sizes as a table for compiled code."""
    return np.array(rows, np.int64)


def columns(*of_rows: Iterable[int]) -> Table:
    """Return the table from one iterable per column, which needs no Python call per row."""
    return np.fromiter(itertools.chain(*of_rows), np.int64).reshape(len(of_rows), -1).T.copy()


def addresses(tensors: Iterable[torch.Tensor]) -> Iterable[int]:
    """Return where each tensor begins."""
    return map(torch.Tensor.data_ptr, tensors)


def sizes(tensors: Iterable[torch.Tensor]) -> Iterable[int]:
    """Return the number of elements of each tensor."""
    return map(torch.Tensor.numel, tensors)


@functools.cache
def library() -> Library | None:
    """Return the library; None without one, with one warning, or if DPSHARD_NATIVE=0."""
    if os.environ.get("DPSHARD_NATIVE") == "0" or sys.byteorder != "little":
        return None
    found = path()
    if found is None:
        warnings.warn(
            "dpshard is installed without its compiled C, so numpy and torch do its work, more slowly. "
            "`dpshard doctor` says what to do. DPSHARD_NATIVE=0 silences this warning.",
            stacklevel=2,
        )
        return None
    return load(found)


def path() -> str | None:
    """Path of the library; None without a compiler."""
    found = find_spec("dpshard.kernels.native._native")
    return None if found is None else found.origin


def supports_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if compiled code supports ghost norms and convolutions."""
    if device.type != "cpu" or dtype != torch.float32:
        return False
    compiled = library()
    return compiled is not None and compiled.has_tiles


def is_unobserved(*tensors: torch.Tensor) -> bool:
    """Return True if a torch operator would only run its function, so that the function can be called directly.

    This is False under a mode or compiler that intercepts operators, and for fake tensors.
    """
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and all(type(x) is torch.Tensor for x in tensors)
        and not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
    )


def is_built() -> bool:
    """Return True if this process uses compiled code."""
    return library() is not None


def load(path: str) -> Library | None:
    """Load the library; warn and return None if it has another interface or wrong results."""
    try:
        loaded = Library(path)
        loaded.try_out()
    except (OSError, AttributeError, ArithmeticError) as error:
        warnings.warn(
            f"{path} cannot be used ({error}), so numpy and torch replace it, more slowly. "
            f"Install dpshard again. DPSHARD_NATIVE=0 silences this warning.",
            stacklevel=2,
        )
        return None
    return loaded


def team() -> Team:
    """Return the Team of torch's threads if GOMP_parallel is available, else that of this thread only."""
    return _gomp_parallel(), torch.get_num_threads()


@functools.cache
def _gomp_parallel() -> int | None:
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return ctypes.cast(function, ctypes.c_void_p).value if function else None


class Library:
    """The compiled functions, which do not check arguments.

    Raises OSError if there is no library, and AttributeError if it has another interface.
    """

    def __init__(self, path: str) -> None:
        self._c = ctypes.CDLL(path)
        if self._c.dpshard_interface() != _INTERFACE:
            raise AttributeError("it was built from the source of another version")
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._c, name)
            function.restype, function.argtypes = result, arguments
        self._team = _alone
        self.has_tiles = bool(self._c.dpshard_has_tiles())
        """True if the processor has the registers for `ghost_norms` and `convolution_gradients`."""
        self.has_cipher = bool(self._c.dpshard_has_cipher())
        """True if the processor has the instructions for `release_keyed_`."""

    def normals(self, words: NDArray[np.int32], normals: NDArray[Any]) -> None:
        """Fill `normals` from random words; see normals.box_muller."""
        units, _, n = words.shape
        stride = words.strides[0] // words.itemsize
        self._c.dpshard_normals(*self._team(), words.ctypes.data, stride, normals.ctypes.data, units, n, _wide(normals))

    def release_(self, x: NDArray[Any], noise: NDArray[Any], std: float, divisor: float) -> None:
        """Add noise to `x` and divide it, in place; see normals.release_."""
        n, wide = len(x), (_wide(x), _wide(noise))
        self._c.dpshard_release(*self._team(), x.ctypes.data, noise.ctypes.data, n, std, divisor, *wide)

    def release_pieces_(
        self, pieces: Table, streams: Sequence[bytes], std: float, divisor: float, wide: tuple[bool, bool]
    ) -> None:
        """See normals.release_pieces_; `pieces`: address, half, lo, end; `wide`: sums, noise."""
        at = (ctypes.c_char_p * len(streams))(*streams)
        args = pieces.ctypes.data, at, len(pieces), len(streams) // len(pieces), std, divisor
        self._c.dpshard_release_pieces(*self._team(), *args, *wide)

    def release_keyed_(
        self, pieces: Table, keys: Sequence[bytes], std: float, divisor: float, wide: tuple[bool, bool]
    ) -> None:
        """See normals.release_pieces_; the arguments are those of `release_pieces_`, with the keys of the streams."""
        args = pieces.ctypes.data, b"".join(keys), len(pieces), len(keys) // len(pieces), std, divisor
        self._c.dpshard_release_keyed(*self._team(), *args, *wide)

    def digests(self, stretches: Table, columns: int, total: int) -> None:
        """See digest.add_digests_; `stretches`: address, n, at, address of the rows."""
        self._c.dpshard_digests(*self._team(), stretches.ctypes.data, len(stretches), columns, total)

    def checksums(self, arrays: Table, sums: int) -> None:
        """See sums.checksums; `arrays`: address, n, itemsize."""
        self._c.dpshard_checksums(*self._team(), arrays.ctypes.data, len(arrays), sums)

    def norms_sq(self, arrays: Table, norms: int) -> None:
        """See sums.norms_sq; `arrays`: address, n, itemsize."""
        self._c.dpshard_norms_sq(*self._team(), arrays.ctypes.data, len(arrays), norms)

    def ghost_norms(
        self, rows: Vectors, cols: Vectors, sizes: Sequence[int], relative_floor: float, norms: int
    ) -> None:
        """See gram.floored_ghost_norm_sq; positive sizes B, G, T, R, C; address of norms [B]. Raises MemoryError."""
        (x, of_x), (y, of_y) = rows, cols
        strides = _Strides(*of_x), _Strides(*of_y)
        all_sizes = _ProductSizes(*sizes)
        if not self._c.dpshard_ghost_norms(
            *self._team(), x, strides[0], y, strides[1], all_sizes, relative_floor, norms
        ):
            raise MemoryError(f"There is no memory for the partial sums of the norms of {sizes[0]} samples.")

    def convolution_gradients(
        self, input: int, gradient: int, kernels: int | None, norms: int, sizes: Sequence[int]
    ) -> None:
        """See convolution.per_sample_gradients_; by address. No `kernels`: only norms. Raises MemoryError."""
        if not self._c.dpshard_convolution_gradients(
            *self._team(), input, gradient, kernels, norms, _ConvolutionSizes(*sizes)
        ):
            raise MemoryError(f"There is no memory to pack the output gradients of {sizes[0]} samples.")

    def normalization_gradients(
        self, addresses: Sequence[int], sizes: Sequence[int], eps: float, centered: bool
    ) -> None:
        """Compute per-sample gradients; see normalization.normalization_gradients."""
        self._c.dpshard_normalization_gradients(*self._team(), *addresses, _NormalizationSizes(*sizes), eps, centered)

    def try_out(self) -> None:
        """Raise ArithmeticError if results differ from numpy's, because a faulty build could lose noise."""
        for kind, noise_kind in ((np.float32, np.float32), (np.float32, np.float64), (np.float64, np.float64)):
            self._try_noise(kind, noise_kind)
            self._try_pieces(kind, noise_kind)
        self._try_digest()
        self._try_sums()
        self._try_normalization()
        if self.has_tiles:
            self._try_norms()
            self._try_convolution(33)  # three times sixteen channels
            self._try_convolution(49)  # twice thirty-two, if registers are wide
        self._team = team

    def _try_noise(self, kind: Any, noise_kind: Any) -> None:
        n, rows, std, divisor = 100, 3 if noise_kind == np.float32 else 4, 3.0, 7.0
        words = (np.arange(rows * n, dtype=np.int64) * 2654435761 % 2**32).astype(np.uint32).view(np.int32)
        noise, expected_noise = np.empty((2, 1, 2, n), noise_kind)
        x = np.linspace(-1, 1, 2 * n, dtype=kind)
        expected = x.copy()
        self.normals(words.reshape(1, rows, n), noise)
        self.release_(x, noise.reshape(-1), std, divisor)
        reference.box_muller(words.reshape(1, rows, n).copy(), expected_noise, np.empty((rows, 1, n), noise_kind))
        reference.release_(expected, expected_noise.reshape(-1), std, divisor)
        if not np.allclose(x, expected, rtol=0, atol=1e-5):
            raise ArithmeticError("it draws noise wrongly")

    def _try_pieces(self, kind: Any, noise_kind: Any) -> None:
        half, std, divisor = 1500, 3.0, 7.0  # more pairs than one chunk has
        rows, summands = (3, 1) if noise_kind == np.float32 else (4, 4 if kind == np.float32 else 1)
        spans = (0, 7), (3, half), (half + 2, 2 * half), (half - 5, half + 1100), (0, 2 * half)
        count = len(spans) * summands
        keys = [_scattered(8 + i).tobytes()[4 * i :] for i in range(count)]
        streams = [_scattered(rows * half + i).tobytes()[4 * i :] for i in range(count)]
        of_keys = reference.streams(keys, [4 * rows * half] * count) if self.has_cipher else []
        wide = kind == np.float64, noise_kind == np.float64
        for release_, given, used in (
            (self.release_pieces_, streams, streams),
            *([(self.release_keyed_, keys, of_keys)] if of_keys else []),
        ):
            parts = [np.linspace(-1, 1, end - lo, dtype=kind) for lo, end in spans]
            expected = [part.copy() for part in parts]
            pieces = table([(x.ctypes.data, half, lo, end) for x, (lo, end) in zip(parts, spans, strict=True)])
            release_(pieces, given, std, divisor, wide)
            for i, (x, (lo, end)) in enumerate(zip(expected, spans, strict=True)):
                own = used[i * summands : (i + 1) * summands]
                reference.release_piece_(x, own, half, lo, end, std, divisor, noise_kind)
            if not all(np.allclose(x, y, rtol=0, atol=1e-5) for x, y in zip(parts, expected, strict=True)):
                raise ArithmeticError("it draws noise wrongly")

    def _try_digest(self) -> None:
        at, words = 4000, _scattered(70_000).view(np.int32)  # more rows than a thread processes at once
        columns, rows = _scattered(2, 4096).view(np.int32), _scattered(19, 4).view(np.int64)
        total = np.ones(2, np.int64)
        stretches = [(words.ctypes.data, len(words), at, rows.ctypes.data), (words.ctypes.data, 3, 0, rows.ctypes.data)]
        self.digests(table(stretches), columns.ctypes.data, total.ctypes.data)
        first, second = (reference.digest(words[:n], start, columns, rows) for _, n, start, _ in stretches)
        if not np.array_equal(total, 1 + first + second):
            raise ArithmeticError("it digests sums wrongly")

    def _try_sums(self) -> None:
        arrays = [_scattered(70_003), _scattered(3), _scattered(5, 4).astype(np.float64), _scattered(6).view(np.int16)]
        found, norms = np.zeros(len(arrays), np.int64), np.zeros(3)
        rows = table([(x.ctypes.data, x.size, x.itemsize) for x in arrays])
        self.checksums(rows, found.ctypes.data)
        self.norms_sq(rows[: len(norms)], norms.ctypes.data)
        if not np.array_equal(found, [reference.checksum(x) for x in arrays]):
            raise ArithmeticError("it digests sums wrongly")
        if not np.allclose(norms, [np.square(x, dtype=np.float64).sum() for x in arrays[:3]], rtol=1e-12):
            raise ArithmeticError("it takes norms wrongly")

    def _try_normalization(self) -> None:
        B, K, N = 2, 6, 2100  # more than a chunk
        for groups, shape, centered in ((3, (B, K, N), True), (0, (B, N, K), True), (0, (B, K, N), False)):
            x, gradient = _scattered(*shape, 1)[..., 0], _scattered(*shape)[::-1].copy()
            made, room = np.empty((2, B, shape[1 if groups else 2]), np.float32), np.empty((2, B, shape[2]), np.float32)
            sizes = (B, groups, N, K) if groups else (B, 0, *shape[1:])
            addresses = [array.ctypes.data for array in (x, gradient, made, room)]
            self.normalization_gradients(addresses, sizes, 1e-2, centered)
            expected = reference.normalization_gradients(x, gradient, groups, 1e-2, centered)
            if not np.allclose(made, expected, rtol=0, atol=1e-4 * abs(expected).max()):
                raise ArithmeticError("it differentiates normalisations wrongly")

    def _try_norms(self) -> None:
        B, G, T, *dims = sizes = (2, 2, 300, 5, 600)  # three blocks of positions, five chunks of columns
        rows, cols = (_scattered(B, G, n, T).swapaxes(2, 3) for n in dims)
        # In two cases, squares of one factor underflow, while the other factor has large values.
        for of_rows, of_cols, floor in ((1, 1, 0.0), (1, 1, 1.0), (2.0**-75, 2.0**55, 0.0), (2.0**55, 2.0**-75, 0.0)):
            x, y, norm_sq = rows * np.float32(of_rows), cols * np.float32(of_cols), np.empty(B, np.float32)
            vectors = [(array.ctypes.data, [stride // array.itemsize for stride in array.strides]) for array in (x, y)]
            self.ghost_norms(vectors[0], vectors[1], sizes, floor, norm_sq.ctypes.data)
            if not np.allclose(norm_sq, reference.floored_ghost_norm_sq(x, y, floor), rtol=1e-4):
                raise ArithmeticError("it takes norms wrongly")

    def _try_convolution(self, R: int) -> None:
        B, k, G, C = 2, 2, 2, 3
        positions, kernel, stride, dilation, padding = (2, 3, 100), (2, 2, 3), (2, 1, 3), (2, 1, 3), (1, 1, 0)
        space = (3, 2, 304)  # with padding, the last window reaches the last element
        input, gradient = _scattered(B, k, G, C, *space), _scattered(B, k, G, R, *positions)
        kernels, norms = np.empty((B, G, R, C, *kernel), np.float32), np.empty(B, np.float32)
        sizes = (B, k, G, R, C, *positions, *kernel, *stride, *dilation, *space, *padding)
        x, g, to, out = (array.ctypes.data for array in (input, gradient, kernels, norms))
        self.convolution_gradients(x, g, to, out, sizes)
        padded = np.pad(input, [(0, 0)] * 4 + [(p, p) for p in padding])
        expected = reference.convolution_gradients(padded, gradient, kernel, stride, dilation)
        right = np.allclose(kernels, expected, rtol=0, atol=1e-4 * abs(expected).max())
        if not right or not np.allclose(norms, np.square(expected).sum((1, 2, 3, 4, 5, 6)), rtol=1e-4):
            raise ArithmeticError("it differentiates convolutions wrongly")


def _scattered(*shape: int) -> NDArray[np.float32]:
    n = int(np.prod(shape))
    return (np.arange(n, dtype=np.int64) * 2654435761 % 65521 / 32760.5 - 1).astype(np.float32).reshape(shape)


def _alone() -> Team:
    return None, 1


def _wide(x: NDArray[Any]) -> bool:
    return x.dtype == np.float64
