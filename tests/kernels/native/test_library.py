"""Compiled code is built with the package and tested before use; without it, the package still works."""

import subprocess
import sys

import pytest
import torch

from dpshard.kernels import native
from dpshard.kernels.native.library import load, team
from tests.grids import covering
from tests.kernels.native.support import build


def test_it_is_built_with_the_package():
    assert native.is_built()


def test_threads_are_those_of_torch():
    address, threads = team()
    assert address
    assert threads == torch.get_num_threads()


def test_a_variable_switches_it_off():
    program = "from dpshard.kernels import native; print(native.is_built())"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env={"DPSHARD_NATIVE": "0"}, check=True)
    assert done.stdout.strip() == "False"


def test_a_start_without_it_says_so_once():
    twice = "print(library.is_built(), library.is_built())"
    program = f"from dpshard.kernels.native import library; library.path = lambda: None; {twice}"
    done = subprocess.run([sys.executable, "-W", "always", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False False"
    assert done.stderr.count("dpshard is installed without its compiled C") == 1
    assert "dpshard doctor" in done.stderr


@pytest.mark.parametrize("source", ["int other(void) { return 1; }", "int dpshard_interface(void) { return 0; }", None])
def test_a_library_of_another_version_or_none_at_all_is_not_called(source, tmp_path):
    built = tmp_path / "library.so"
    if source is None:
        built.write_bytes(b"not a library")
    else:
        (tmp_path / "source.c").write_text(source)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", built, tmp_path / "source.c"], check=True)
    with pytest.warns(UserWarning, match=r"library\.so cannot be used.*Install dpshard again"):
        assert load(str(built)) is None


WRONG = [
    ("normals", "(wide)x[i] + std", "(wide)x[i] + 0"),
    ("normals", "2.0f / 3 ", "2.0f / 4 "),
    ("normals", "2.0 / 3 ", "2.0 / 4 "),
    ("normals", "quarter & 2 ?", "quarter & 1 ?"),
    ("normals", "/ divisor;", ";"),
    ("normals", "pair + second * half", "pair"),
    ("normals", "second * n + from", "from"),
    ("normals", "streams[i] + pair", "streams[0] + pair"),
    ("normals", "1 / sqrt(job->summands)", "1.0"),
    ("normals", "i * releasing->summands", "i"),
    ("normals", "job->keys + KEY * i", "job->keys"),
    ("normals", "+ 4 - first % 4", "+ 4"),
    ("normals", "words_of(job, i + k,", "words_of(job, i,"),
    ("cipher", "(done + i) + 2)", "(done + i) + 1)"),
    ("cipher", "count - done < AT_ONCE ? count - done : AT_ONCE", "1"),
    ("cipher", "round < ROUNDS;", "round < ROUNDS - 1;"),
    ("cipher", "keys[13], 0x40", "keys[13], 0x20"),
    ("digest", "stretches + i", "stretches"),
    ("sums", "(int64_t)words[i] * words[i]", "1"),
    ("sums", "CHECKSUM(checksum_of_shorts, int16_t)", "CHECKSUM(checksum_of_shorts, uint16_t)"),
    ("sums", "(const int32_t *)array->x + at", "(const int32_t *)array->x"),
    ("sums", "(double)x[i] * (double)x[i];", "0;"),
    ("sums", "array->itemsize == 8 ?", "0 ?"),
    ("digest", "rows[2 * row + 1]", "rows[2 * row]"),
    ("digest", "columns + (start - origin)", "columns"),
    ("digest", "words[i] * others[i]", "words[i] * columns[i]"),
    ("gram", "sum[l] += 2 *", "sum[l] +="),
    ("gram", "k, start > 0)", "k, 0)"),
    ("gram", "start < of->n;", "start < of->n && start < 512;"),
    ("gram", "while (j > i)", "if (j > i)"),
    ("gram", "* of->g", "* 0"),
    ("gram", "x + j * of->t", "x + i * of->t"),
    ("gram", "roots += ", "roots = "),
    ("gram", "found.product += ", "found.product = "),
    ("gram", "gram[t][t] += of->hidden;", ";"),
    ("gram", "product < least ? least : product", "product"),
    ("convolution", "*(vector *)(out + j * (WIDE) + p * WIDTH) +=", "*(vector *)(out + j * (WIDE) + p * WIDTH) ="),
    ("convolution", "i < c->k; i++)\n            pack", "i < 1; i++)\n            pack"),
    ("convolution", "x * c->dilation[2]", "x"),
    ("convolution", "z * c->dilation[0]", "z"),
    ("convolution", "* c->stride[0]", "* c->stride[1]"),
    ("convolution", "y + p[1]", "y"),
    ("convolution", "!= last)", "== last)"),
    ("convolution", "squares[l] +=", "squares[l] ="),
    ("convolution", "+ first) * S,", ") * S,"),
    ("convolution", "offsets + done", "offsets"),
    ("convolution", "t < start + LINE &&", "t + 1 < start + LINE &&"),
    ("normalization", "weights[k] += some_weights[k]", "weights[k] = some_weights[k]"),
    ("normalization", "biases[k] += some_biases[k]", "biases[k] = some_biases[k]"),
    ("normalization", "(x[k] - mean)", "x[k]"),
    ("normalization", "+ layer->eps", "+ 0"),
    ("normalization", "layer->centered ?", "1 ?"),
    ("normalization", "total.product +=", "total.product ="),
    ("normalization", "total.sum +=", "total.sum ="),
    ("normalization", "over(lanes) + sum", "over(lanes)"),
    ("normalization", "over(products) + product", "over(products)"),
    ("normalization", "(float)(total.product * scale)", "(float)total.product"),
    ("normalization", "g = layer->g + piece * rows * N", "g = layer->g"),
]


@pytest.mark.parametrize(("source", "right", "wrong"), covering(WRONG, lambda source, right, wrong: {source}))
def test_a_build_that_computes_wrongly_is_not_used(source, right, wrong, tmp_path):
    """Dropped noise, a wrong logarithm or sign, no batch size; missing parts of a norm or a gradient."""
    built = build(tmp_path, **{source: (right, wrong)})
    wrongly = "it (draws noise|digests sums|takes norms|differentiates (convolutions|normalisations)) wrongly"
    with pytest.warns(UserWarning, match=wrongly):
        assert load(built) is None
