"""Faults that make private training void, each put into the engine from outside; the product has no switch for any."""

from dataclasses import replace

import numpy as np
import torch

import dpshard.engine
from dpshard.clipping.tape import Tape
from dpshard.noise.keyed import KeyedGaussian
from dpshard.sampling import PoissonSampler

RELEASE, SUM = KeyedGaussian.release_, Tape._sum
MEASURE, PLAN = dpshard.clipping.tape.measure, dpshard.engine.plan_micro_batches


def weaken_noise(monkeypatch, by):
    """The noise has one `by`-th of its deviation."""
    monkeypatch.setattr(
        KeyedGaussian, "release_", lambda self, shards, *, std, **rest: RELEASE(self, shards, std=std / by, **rest)
    )


def reuse_noise(monkeypatch, steps=10**9):
    """So many steps in a row have the noise of the first of them."""
    monkeypatch.setattr(
        KeyedGaussian,
        "release_",
        lambda self, shards, *, step, **rest: RELEASE(self, shards, step=step - step % steps, **rest),
    )


def drop_clipping(monkeypatch, of):
    """The gradients of one parameter are summed as they are."""

    def summed(self, group, name):
        clipped = group.multiplier_B
        if name == of and clipped is not None:
            group.multiplier_B = torch.where(clipped > 0, torch.full_like(clipped, self.loss_scale), clipped)
        SUM(self, group, name)
        group.multiplier_B = clipped

    monkeypatch.setattr(Tape, "_sum", summed)


def clip_uses_apart(monkeypatch):
    """A parameter that is used twice is measured use by use, without the inner products of its gradients."""

    def measured(records, method, *, keep, closing):
        parts = [MEASURE([record], method, keep=keep, closing=closing) for record in records]
        return sum(norm_sq_B for norm_sq_B, _ in parts), [record for _, kept in parts for record in kept]

    monkeypatch.setattr(dpshard.clipping.tape, "measure", measured)


def shuffle(monkeypatch):
    """Batches are slices of a permutation, a new one each epoch, but accounted as Poisson samples."""

    def draw(self, step):
        size = self.schedule[step]
        epoch, position = divmod(step, self.sample_size // size)
        order = np.random.default_rng(epoch).permutation(self.sample_size)
        return np.sort(order[position * size : (position + 1) * size])

    monkeypatch.setattr(PoissonSampler, "draw", draw)


def count_padding(monkeypatch):
    """Rows that fill up a micro-batch are samples."""

    def planned(*arguments):
        return [replace(plan, is_padding=torch.zeros_like(plan.is_padding)) for plan in PLAN(*arguments)]

    monkeypatch.setattr(dpshard.engine, "plan_micro_batches", planned)
