"""Libraries that are built of changed sources, and random rows, columns and images."""

import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dpshard import native
from dpshard.native.library import load
from dpshard.rules.records import Convolution

SOURCES = Path(native.__file__).parent

KEY = bytes(range(32))


def build(path, **changed):
    """A library of the sources, some of them changed, at `path`."""
    for source in (*SOURCES.glob("*.c"), *SOURCES.glob("*.h")):
        (path / source.name).write_text(source.read_text())
    for name, (right, wrong) in changed.items():
        (source,) = path.glob(f"{name}.[ch]")
        text = source.read_text()
        assert right in text
        source.write_text(text.replace(right, wrong))
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", path / "built.so", *path.glob("*.c"), "-lm"]
    subprocess.run(command, check=True)
    return str(path / "built.so")


def narrow_library(path):
    narrow = load(build(path, tiles=('__builtin_cpu_supports("avx512f")', "0")))
    assert narrow is not None
    if not narrow.has_tiles:
        pytest.skip("this processor has no AVX2")
    return narrow


def product(B, G, T, R, C):
    generator = torch.Generator().manual_seed(T)
    return (torch.randn(B, G, T, n, generator=generator) for n in (R, C))


def by_hand(rows, cols):
    """Squared norms, and the squares of the sums that rounding is relative to, in float64."""
    rows, cols = rows.double(), cols.double()
    gradients = torch.einsum("bgtr,bgtc->bgrc", rows, cols)
    return gradients.square().sum((1, 2, 3)), (rows.norm(dim=3) * cols.norm(dim=3)).sum((1, 2)).square()


def images(B, k, C, P, space, kernel, stride=1, padding=0, dilation=1, groups=1):
    """Random images [B, k, C, *space], and output gradients of their convolution."""
    generator = torch.Generator().manual_seed(C * P)
    x = torch.randn(B, k, C, *space, generator=generator)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(space) - 1]
    y = convolve(x.flatten(0, 1), torch.zeros(P, C // groups, *kernel), None, stride, padding, dilation, groups)
    return x, torch.randn(B, k, *y.shape[1:], generator=generator)


def convolution(B, k, C, P, space, kernel, stride=1, padding=0, dilation=1, groups=1):
    pair = images(B, k, C, P, space, kernel, stride, padding, dilation, groups)
    steps = ((n,) * len(space) if isinstance(n, int) else n for n in (stride, padding, dilation))
    return Convolution(*pair, torch.Size((P, C // groups, *kernel)), *steps, groups)
