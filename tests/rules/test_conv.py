"""Convolutions and transposed ones in 1, 2 and 3 dimensions, against the oracle."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpshard.errors import UnsupportedParameterError
from tests.oracle import Use, assert_exact, randn

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
SPACE = (6, 5, 4)

ranks = pytest.mark.parametrize("rank", [1, 2, 3])
# padding="same" with an even kernel pads more at the end; torch says that it copies then.
even_same = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def images(rank, B=3, C=4):
    return randn(B, C, *SPACE[:rank])


@ranks
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"kernel_size": 1},
        {"stride": 2, "padding": 1},
        {"padding": 2, "dilation": 2},
        {"padding": "valid"},
        {"padding": "same"},
        {"padding": "same", "dilation": 2},
        {"padding": "same", "kernel_size": 2},
        {"groups": 2, "padding": 1},
        {"groups": 4, "padding": 1, "bias": False},  # depthwise
        {"padding": 1, "padding_mode": "circular"},
        {"padding": 1, "padding_mode": "reflect", "stride": 2},
        {"padding": 1, "padding_mode": "replicate"},
        {"padding": "same", "padding_mode": "reflect"},
    ],
    ids=str,
)
@even_same
def test_convolution(rank, options):
    layer = CONV[rank](4, 8, **{"kernel_size": 3, **options})
    assert_exact(nn.Sequential(CONV[rank](4, 4, 1), layer), images(rank))


@ranks
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"stride": 2, "padding": 1},
        {"stride": 2, "padding": 1, "output_padding": 1},
        {"padding": 1, "dilation": 2},
        {"groups": 2, "stride": 2},
        {"groups": 4, "bias": False},
    ],
    ids=str,
)
def test_transposed_convolution(rank, options):
    layer = TRANSPOSED[rank](4, 8, 3, **options)
    assert_exact(nn.Sequential(CONV[rank](4, 4, 1), layer), images(rank))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    groups=st.sampled_from([1, 2, 4]),
    transposed=st.booleans(),
)
def test_every_dimension_has_its_own_numbers(kernel, stride, padding, dilation, groups, transposed):
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    if transposed:
        padding = (0, 0)  # a larger kernel would leave nothing
    layer = kind(4, 4, kernel, stride=stride, padding=padding, dilation=dilation, groups=groups)
    assert_exact(layer, randn(3, 4, 6, 5), modes=["auto", "bk"])


@even_same
def test_same_padding_of_an_uneven_kernel():
    assert_exact(nn.Conv2d(4, 2, (2, 3), padding="same", dilation=(1, 2)), images(2))
    assert_exact(nn.Conv2d(4, 2, (4, 2), padding="same", dilation=(1, 3)), images(2))


@pytest.mark.parametrize("B", [3, 4])
def test_images_of_one_sample_in_the_batch_dimension(B):
    """Frames or patches flattened into the batch, sample by sample or the other way round."""
    frames_last = Use(lambda m, x: m.c(x.flatten(0, 1)).unflatten(0, x.shape[:2]), c=nn.Conv2d(3, 2, 2))
    assert_exact(frames_last, randn(B, 4, 3, 4, 4))
    frames_first = Use(
        lambda m, x: m.c(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (4, -1)).transpose(0, 1), c=nn.Conv2d(3, 2, 2)
    )
    assert_exact(frames_first, randn(B, 4, 3, 4, 4))


def test_channels_last():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 1)).to(memory_format=torch.channels_last)
    assert_exact(model, images(2).to(memory_format=torch.channels_last))


def test_frozen_weight():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 8, 3))
    model[1].weight.requires_grad_(False)
    assert_exact(model, images(2))


def test_one_long_image_is_refused():
    """A kernel that slides over the batch dimension mixes samples."""
    model = Use(lambda m, x: F.conv1d(x.t()[None], m.w, padding=1)[0].t(), w=randn(4, 4, 3))
    with pytest.raises(UnsupportedParameterError, match=r"w in the model \(Use\), function .*conv1d"):
        assert_exact(model, randn(5, 4))
