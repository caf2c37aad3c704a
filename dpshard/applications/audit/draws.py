"""Tests that batches are drawn as accounted."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dpshard.accounting import SampledMechanism
from dpshard.applications.audit.noise import Finding
from dpshard.config import steps_of_epoch


def participation_findings(drawn: list[NDArray[np.bool_]], mechanism: SampledMechanism) -> list[Finding]:
    """Test which of the first n samples are drawn, [T, n] of each engine."""
    samples, size = mechanism.sample_size, mechanism.schedule[0]
    if mechanism.sampling == "fixed-order":
        return _order_findings(drawn, samples // size)
    if mechanism.sampling == "balls-in-bins":
        one_draw = mechanism.noise_correlation is not None
        return _allocation_findings(drawn, steps_of_epoch(samples, size), one_draw=one_draw)
    if mechanism.sampling == "poisson" or mechanism.noise_correlation is None:
        return draw_findings(drawn, size / samples)
    groups = mechanism.noise_correlation.bands
    turns = [np.arange(len(d))[:, None] % groups == np.arange(d.shape[1]) % groups for d in drawn]
    rounds = [len(d) // groups for d in drawn]
    coins = [
        np.stack([d[turn[:, i], i][:whole] for i in range(d.shape[1])], axis=1)
        for d, turn, whole in zip(drawn, turns, rounds, strict=True)
    ]
    in_turn = not any((d & ~turn).any() for d, turn in zip(drawn, turns, strict=True))
    return [_sure("a sample is in a batch of another group", in_turn), *draw_findings(coins, groups * size / samples)]


def _order_findings(drawn: list[NDArray[np.bool_]], apart: int) -> list[Finding]:
    windows = [np.lib.stride_tricks.sliding_window_view(d, apart, axis=0).sum(-1) for d in drawn]
    return [
        _sure("a sample takes part more than once in an epoch", all((w <= 1).all() for w in windows)),
        _sure("a sample does not take part in an epoch", all((w >= 1).all() for w in windows)),
    ]


def _allocation_findings(drawn: list[NDArray[np.bool_]], epoch: int, *, one_draw: bool) -> list[Finding]:
    epochs = [d[: len(d) // epoch * epoch].reshape(-1, epoch, d.shape[1]) for d in drawn]
    found = [_sure("a sample is not in exactly one step of an epoch", all((e.sum(1) == 1).all() for e in epochs))]
    if epoch == 1:
        return found
    places = [e.argmax(1) for e in epochs]
    if one_draw:
        found.append(_sure("a sample changes its step of the epoch", all((p == p[:1]).all() for p in places)))
        places = [p[:1] for p in places]
    every = np.concatenate(places)
    found += [
        _count("samples prefer a step of the epoch", every == place, 1 / epoch, alike=epoch) for place in range(epoch)
    ]
    half = every.shape[1] // 2
    pairs = {
        "samples share their step": [every[:, :half] == every[:, half : 2 * half]],
        "a step depends on that of the epoch before": [p[1::2] == p[: len(p) // 2 * 2 : 2] for p in places],
        "two engines draw the same": [places[0] == places[1]] if len({p.shape for p in places}) < len(places) else [],
    }
    coins = {what: np.concatenate([c.ravel() for c in coins]) for what, coins in pairs.items() if coins}
    return [*found, *(_count(what, heads, 1 / epoch) for what, heads in coins.items() if heads.size)]


def _sure(what: str, holds: bool) -> Finding:
    return Finding(what, 0.0 if holds else -math.inf)


def draw_findings(drawn: list[NDArray[np.bool_]], q: float) -> list[Finding]:
    """Test that draws are independent coins of probability `q`."""
    n = drawn[0].shape[1]
    if q == 1:
        return [_sure("samples are not in every batch", all(bool(d.all()) for d in drawn))]
    everyone = np.concatenate(drawn)
    agree = q * q + (1 - q) ** 2
    found = [_count("samples are drawn too often or too rarely", everyone, q)]
    found += [
        _count(f"sample {sample} is drawn too often or too rarely", everyone[:, sample], q, alike=n)
        for sample in range(n)
    ]
    for apart in (1, 2, 3, 4):
        pairs = [d[t] == d[t + apart] for d in drawn for t in range(len(d) - apart) if (t // apart) % 2 == 0]
        if pairs:
            found.append(_count(f"a draw depends on the draw {apart} steps before", np.array(pairs), agree))
    if n > 1:
        half = n // 2
        together = everyone[:, :half] == everyone[:, half : 2 * half]
        found.append(_count("draws of samples depend on each other", together, agree))
        size = round(q * n)
        exactly = everyone.sum(1) == size
        found.append(_count("batches have the same size too often", exactly, float(stats.binom.pmf(size, n, q))))
    epoch = round(1 / q)
    epochs = [d[t : t + epoch].sum(0) == 1 for d in drawn for t in range(0, len(d) - epoch + 1, epoch)]
    if epochs:
        once = float(stats.binom.pmf(1, epoch, q))
        found.append(_count("samples come once in every epoch", np.array(epochs), once))
    if len(drawn) == 2:
        short = min(map(len, drawn))
        found.append(_count("two engines draw the same", drawn[0][:short] == drawn[1][:short], agree))
    return found


def _count(what: str, coins: NDArray[np.bool_], p: float, *, alike: int = 1) -> Finding:
    """Test the number of heads, as one of `alike` tests."""
    heads, tosses = int(coins.sum()), coins.size
    tails = stats.binom.logcdf(heads, tosses, p), stats.binom.logsf(heads - 1, tosses, p)
    return Finding(what, min(0.0, math.log(2 * alike) + float(min(tails))))
