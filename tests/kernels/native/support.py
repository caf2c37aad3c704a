"""Libraries built from changed sources, and norms by hand."""

import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from dpshard.kernels import native
from dpshard.kernels.native.library import load

SOURCES = Path(native.__file__).parent


def build(path, **changed):
    """Build a library at `path` from the sources, some of them changed."""
    texts = {source.name: source.read_text() for source in (*SOURCES.glob("*.c"), *SOURCES.glob("*.h"))}
    for name, (right, wrong) in changed.items():
        (source,) = (source for source in texts if source.startswith(f"{name}."))
        assert right in texts[source]
        texts[source] = texts[source].replace(right, wrong)
    headers = tuple(sorted((name, text) for name, text in texts.items() if name.endswith(".h")))
    objects = []
    for name in sorted(texts.keys() - dict(headers)):
        objects.append(path / f"{name}.o")
        objects[-1].write_bytes(_compiled(name, texts[name], headers))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path / "built.so", *objects, "-lm"], check=True)
    return str(path / "built.so")


@cache
def _compiled(name, text, headers):
    """Return the object code of a source; most builds change one of several sources."""
    with tempfile.TemporaryDirectory() as folder:
        for file, content in (*headers, (name, text)):
            Path(folder, file).write_text(content)
        subprocess.run(["cc", "-O1", "-fPIC", "-c", "-o", "object", name], cwd=folder, check=True)
        return Path(folder, "object").read_bytes()


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
