"""Correlated noise from buffers: the noise of vectors drawn again, on any shards, after any past (rows 14, 15, 24)."""

import itertools

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz

from dpshard.noise import buffers as buffers_module
from dpshard.noise.buffers import BufferedGaussian, NoiseBuffers
from dpshard.noise.correlation import BandMF
from dpshard.noise.keyed import BLOCK, CorrelatedGaussian, KeyedGaussian, NoiseTerm, SumShard

STEPS, BANDS = 9, 4
CORRELATION = BandMF(bands=BANDS)
LINKS = tuple(bytes([step] * 32) for step in range(1, STEPS + 1))


def fresh():
    return NoiseBuffers(CORRELATION.strategy(STEPS)[:BANDS].tolist())


def shards(dtype=torch.float64):
    """A matrix, a vector, a shard across two blocks, columns of a matrix, a transposed one, and nothing."""
    return [
        SumShard("matrix", torch.zeros(30, 7, dtype=dtype)),
        SumShard("vector", torch.zeros(2500, dtype=dtype), 5),
        SumShard("across", torch.zeros(40, dtype=dtype), BLOCK - 17),
        SumShard("columns", torch.zeros(6, 3, dtype=dtype), 2, run_length=3, stride=10),
        SumShard("transposed", torch.zeros(4, 5, dtype=dtype).T),
        SumShard("empty", torch.zeros(0, dtype=dtype)),
    ]


def released(noise, step, some=None, std=1.0, divisor=1.0):
    some = shards() if some is None else some
    noise.release_(some, step=step, std=std, divisor=divisor)
    return torch.cat([shard.local.reshape(-1) for shard in some])


def run(buffers, steps=range(STEPS), *, secure=False, links=LINKS, of=shards, **release):
    return [
        released(BufferedGaussian(links[step], secure, links[: step + 1], buffers), step, of(), **release)
        for step in steps
    ]


def drawn_again(step, *, secure=False, of=shards, **release):
    weights = CORRELATION.noising(STEPS)
    terms = tuple(NoiseTerm(weights[j], LINKS[step - j], step - j) for j in range(step + 1))
    return released(CorrelatedGaussian(LINKS[step], secure, terms), step, of(), **release)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_the_noise_is_that_of_vectors_drawn_again(dtype, rounding, secure):
    """`rounding` is absolute, for noise of deviation 1.03 to 1.3: 4 to 10 roundings of a few units."""

    def of():
        return shards(dtype)

    for step, noise in enumerate(run(fresh(), secure=secure, of=of)):
        assert torch.allclose(noise, drawn_again(step, secure=secure, of=of), rtol=0, atol=rounding)


def test_noise_drawn_by_the_element_as_on_gpus_is_that_of_the_matrix(monkeypatch):
    """Not against vectors drawn again: their weights are float32 there."""
    monkeypatch.setattr(KeyedGaussian, "_draws_on_cpu", lambda self, device: False)
    z = torch.stack([released(KeyedGaussian(link), step) for step, link in enumerate(LINKS)])
    W = torch.from_numpy(np.tril(toeplitz(CORRELATION.noising(STEPS))))
    noises = torch.stack(run(fresh(), std=2.0, divisor=5.0))
    assert torch.allclose(noises, W @ z * 2 / 5, rtol=0, atol=1e-14)
    assert torch.equal(run(fresh(), [7], std=2.0, divisor=5.0)[0], noises[7])


def test_a_release_is_the_sum_with_the_noise_over_the_divisor():
    def of():
        return [SumShard(s.name, s.local + 3, s.start, s.run_length, s.stride) for s in shards()]

    noise = run(fresh(), [0])[0]
    buffers, some = fresh(), of()
    norm = BufferedGaussian(LINKS[0], False, LINKS[:1], buffers).release_(some, step=0, std=2.0, divisor=5.0)
    assert torch.allclose(torch.cat([s.local.reshape(-1) for s in some]), (3 + 2 * noise) / 5, rtol=1e-14, atol=1e-14)
    assert norm == pytest.approx(3 * len(noise) ** 0.5)
    plain = released(BufferedGaussian(LINKS[1], False, LINKS[:2], buffers), 1, of(), std=0.0, divisor=5.0)
    assert torch.equal(plain, torch.full_like(noise, 3 / 5))


@pytest.mark.parametrize("secure", [False, True])
def test_shards_hold_the_bits_of_the_whole(secure):
    def cut():
        for shard in (SumShard("w", torch.zeros(30, 7)), SumShard("b", torch.zeros(11))):
            flat = shard.local.view(-1)
            for lo, hi in itertools.pairwise((0, 1, len(flat) // 3, len(flat))):
                yield SumShard(shard.name, flat[lo:hi], lo)

    def whole():
        return [SumShard("w", torch.zeros(30, 7)), SumShard("b", torch.zeros(11))]

    expected = run(fresh(), secure=secure, of=whole)
    assert torch.equal(torch.stack(run(fresh(), secure=secure, of=lambda: list(cut()))), torch.stack(expected))


@pytest.mark.parametrize("at", [1, 2, BANDS, STEPS - 1])
def test_buffers_that_are_lost_are_made_again_bit_for_bit(at):
    straight, resumed = run(fresh()), run(fresh(), range(at, STEPS))
    assert torch.equal(torch.stack(resumed), torch.stack(straight[at:]))


def test_buffers_of_another_path_are_not_used():
    """A run goes on to step 7, back to step 4, and takes other sums: its links differ from there on."""
    other = (*LINKS[:4], *(bytes([99 - step] * 32) for step in range(4, STEPS)))
    buffers = fresh()
    run(buffers, range(7))
    branch = run(buffers, range(4, STEPS), links=other)
    assert torch.equal(torch.stack(branch), torch.stack(run(fresh(), links=other)[4:]))
    again = run(buffers, range(7, STEPS))
    assert torch.equal(torch.stack(again), torch.stack(run(fresh())[7:]))


def test_a_release_that_failed_half_way_leaves_no_mixed_vector(monkeypatch):
    straight, buffers, draws = run(fresh()), fresh(), itertools.count()
    run(buffers, range(5))
    draw = KeyedGaussian._release_

    def fail_once(self, *arguments):
        if next(draws) == 1:
            raise OSError("no memory")
        return draw(self, *arguments)

    monkeypatch.setattr(buffers_module, "BLOCK", 100)  # several draws a step
    monkeypatch.setattr(KeyedGaussian, "_release_", fail_once)
    with pytest.raises(OSError, match="no memory"):
        run(buffers, [5])
    assert torch.equal(torch.stack(run(buffers, range(5, STEPS))), torch.stack(straight[5:]))


def test_a_step_that_is_released_again_has_the_same_noise():
    buffers = fresh()
    first, *_ = run(buffers, range(3))[2:]
    assert torch.equal(run(buffers, [2])[0], first)
    assert torch.equal(run(buffers, [3])[0], run(fresh())[3])


def test_a_rank_holds_one_vector_less_than_bands_and_none_of_shards_it_lost():
    buffers = fresh()
    run(buffers, range(4))
    n = sum(shard.local.numel() for shard in shards())
    assert buffers.nbytes == (BANDS - 1) * n * 8

    def fewer():
        return shards()[:2]

    run(buffers, range(4, 6), of=fewer)
    assert buffers.nbytes == (BANDS - 1) * 2710 * 8
    assert torch.equal(run(buffers, [6], of=fewer)[0], run(fresh())[6][:2710])


def test_one_band_needs_no_past():
    buffers = NoiseBuffers([1.0])
    noises = [
        released(BufferedGaussian(link, False, LINKS[: step + 1], buffers), step) for step, link in enumerate(LINKS[:3])
    ]
    for step, noise in enumerate(noises):
        assert torch.equal(noise, released(KeyedGaussian(LINKS[step]), step))


def test_steps_draw_one_vector_each(monkeypatch):
    drawn, draw = [], KeyedGaussian._release_
    monkeypatch.setattr(
        KeyedGaussian, "_release_", lambda self, some, step, *rest: drawn.append(step) or draw(self, some, step, *rest)
    )
    run(fresh())
    assert drawn == list(range(STEPS))


def test_the_noise_has_the_covariance_of_the_strategy():
    """C y is independent and standard: sums of squares, and products of two steps, at 5.6 deviations (1e-6 in all)."""
    y = torch.stack(run(fresh(), of=lambda: [SumShard("w", torch.zeros(20_000, dtype=torch.float64))])).numpy()
    c = CORRELATION.strategy(STEPS)
    z = sum(c[j] * np.concatenate([np.zeros((j, y.shape[1])), y[: STEPS - j]]) for j in range(BANDS))
    gram, n = z @ z.T, y.shape[1]
    assert np.abs(np.diag(gram) - n).max() < 5.6 * (2 * n) ** 0.5
    assert np.abs(gram - np.diag(np.diag(gram))).max() < 5.6 * n**0.5
