"""Libraries built from changed sources, and norms by hand."""

import subprocess
from pathlib import Path

import pytest
import torch

from dpshard.kernels import native
from dpshard.kernels.native.library import load

SOURCES = Path(native.__file__).parent


def build(path, **changed):
    """Build a library at `path` from the sources, some of them changed."""
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


def by_hand(rows, cols):
    """Return squared norms by group [B, G], and the squared sums that rounding is relative to, in float64."""
    rows, cols = rows.double(), cols.double()
    gradients = torch.einsum("bgtr,bgtc->bgrc", rows, cols)
    return gradients.square().sum((2, 3)), (rows.norm(dim=3) * cols.norm(dim=3)).sum(2).square()
