"""The self-test of kernels at their first use on a device: sound ones pass, and each planted fault is named."""

from unittest import mock

import pytest
import torch

from dpshard.kernels.native.digest import WIDTH
from dpshard.kernels.triton import operators, self_test, tiles
from tests.kernels.triton.support import DEVICE, skip_without_kernels

skip_without_kernels()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_sound_kernels_pass(dtype):
    assert self_test.wrong_product(DEVICE, dtype) is None


def test_the_self_test_has_small_and_large_tiles():
    ghost = {tiles.ghost_tile(B * G, T) for B, G, T, _, _ in self_test._SIZES}
    gradient = {max(tiles.gradient_tile(B * G, R, C)) for B, G, _, R, C in self_test._SIZES}
    assert ghost == {16, 32, 64, 128}
    assert {64, 128} <= gradient


def test_sound_noise_passes():
    assert self_test.wrong_noise(DEVICE) is None


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_sound_kernels_pass_under_any_default_dtype(default):
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert self_test.wrong_noise(DEVICE) is None
        assert self_test.wrong_rows(DEVICE) is None
        assert self_test.wrong_digest(DEVICE) is None
    finally:
        torch.set_default_dtype(before)


def doubled_last_tile(result):
    result[-1] *= 2
    return result


def not_finite(result):
    return result * float("nan")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("ghost_norm_sq", doubled_last_tile),
        ("gradient_norm_sq", not_finite),
        ("per_sample", not_finite),
        ("weighted_sum", doubled_last_tile),
    ],
)
def test_a_product_that_differs_is_named(name, fault):
    sound = getattr(operators, name)

    def faulty(*args):
        found = sound(*args)
        return (fault(found[0].clone()), found[1]) if isinstance(found, tuple) else fault(found.clone())

    with mock.patch.object(self_test, "_SIZES", ((2, 1, 20, 18, 17),)), mock.patch.object(operators, name, faulty):
        assert self_test.wrong_product(DEVICE, torch.bfloat16) == name


@pytest.mark.parametrize("fault", [doubled_last_tile, not_finite])
@pytest.mark.parametrize("name", ["row_norm_sq", "weighted_rows"])
def test_a_sum_of_rows_that_differs_is_named(name, fault):
    sound = getattr(operators, name)
    assert self_test.wrong_rows(DEVICE) is None
    with mock.patch.object(operators, name, lambda *args: fault(sound(*args).clone())):
        assert self_test.wrong_rows(DEVICE) == name


def test_rows_of_weight_0_that_are_read_are_named():
    def faulty(x, weights):
        return torch.einsum("ub,ubn->un", weights, x)

    with mock.patch.object(operators, "weighted_rows", faulty):
        assert self_test.wrong_rows(DEVICE) == "weighted_rows"


def wrong_digest(faulty):
    with mock.patch.object(operators, "add_digests_", faulty):
        return self_test.wrong_digest(DEVICE)


def test_a_digest_that_differs_is_named():
    sound = operators.add_digests_

    def of_other_bits(total, words, *rest):
        words[0][-1] ^= 1
        sound(total, words, *rest)

    def of_another_place(total, words, at, *rest):
        sound(total, words, [4 * (place // 4) for place in at], *rest)

    def of_other_tensors(total, words, *rest):
        sound(total, [words[0], words[2][:2], *words[2:]], *rest)

    def of_equal_lanes(total, words, at, columns, rows):
        sound(total, words, at, columns[:1].repeat(2, 1), rows)

    def of_narrow_rows(total, words, at, columns, rows):
        sound(total, words, at, columns, rows.int().long())

    assert self_test._WIDTH == WIDTH
    assert wrong_digest(sound) is None
    for faulty in (of_other_bits, of_another_place, of_other_tensors, of_equal_lanes, of_narrow_rows, lambda *_: None):
        assert wrong_digest(faulty) == "add_digests_"


@pytest.mark.parametrize("std", [0.0, 0.3001])
def test_noise_of_another_size_is_named(std):
    sound = operators.release_

    def faulty(*args):
        *others, _std, divisor = args
        return sound(*others, std, divisor)

    with mock.patch.object(operators, "release_", faulty):
        assert self_test.wrong_noise(DEVICE) == "release_"


def test_noise_of_another_stream_is_named():
    sound = operators.release_

    def faulty(xs, starts, firsts, streams, *rest):
        return sound(xs, starts, firsts, streams.roll(1, 1), *rest)

    with mock.patch.object(operators, "release_", faulty):
        assert self_test.wrong_noise(DEVICE) == "release_"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_tensor_without_noise_of_its_own_is_named(place):
    sound = operators.release_

    def shares_a_stream(xs, starts, firsts, *rest):
        return sound(xs, starts, [firsts[place - 1] if i == place else n for i, n in enumerate(firsts)], *rest)

    def is_left_out(xs, *rest):
        return sound([x.clone() if i == place else x for i, x in enumerate(xs)], *rest)

    for faulty in (shares_a_stream, is_left_out):
        with mock.patch.object(operators, "release_", faulty):
            assert self_test.wrong_noise(DEVICE) == "release_"


def test_noise_without_an_earlier_vector_is_named():
    sound = operators.release_

    def faulty(xs, starts, firsts, streams, weights, *rest):
        return sound(xs, starts, firsts, streams[:1], weights[:1], *rest)

    with mock.patch.object(operators, "release_", faulty):
        assert self_test.wrong_noise(DEVICE) == "release_"
