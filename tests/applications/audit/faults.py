"""Faults that make private training void, put into the engine from outside; the product has no switch for them."""

from dataclasses import replace

import numpy as np
import torch

import dpshard.clipping.closer
import dpshard.clipping.group_tape
import dpshard.sampling.plans
from dpshard.clipping.closer import Closer
from dpshard.clipping.group_tape import GroupTape
from dpshard.config import BatchSchedule
from dpshard.noise.buffers import NoiseBuffers
from dpshard.noise.keyed import KeyedGaussian
from dpshard.randomness import derive_key
from dpshard.records import PerSampleGrad
from dpshard.sampling import FixedOrderSampler, PoissonSampler
from dpshard.sampling.allocation import AllocationSampler
from dpshard.sampling.orders import CyclicPoissonSampler
from dpshard.step.noise_of_run import NoiseOfRun

RELEASE, SUM = KeyedGaussian.release_, GroupTape.sum
MEASURE, PLAN = dpshard.clipping.group_tape.measure, dpshard.sampling.plans.plan_micro_batches


def weaken_noise(monkeypatch, by):
    """Noise has one `by`-th of its deviation."""
    monkeypatch.setattr(
        KeyedGaussian, "release_", lambda self, shards, *, std, **rest: RELEASE(self, shards, std=std / by, **rest)
    )


def reuse_noise(monkeypatch, steps=10**9):
    """`steps` consecutive steps share the noise of the first."""
    first = {}

    def release(self, shards, *, step, **rest):
        if step % steps == 0:
            first["noise"] = self  # its key depends on the sums of the step
        return RELEASE(first["noise"], shards, step=step - step % steps, **rest)

    monkeypatch.setattr(KeyedGaussian, "release_", release)


def drop_clipping(monkeypatch, of):
    """The gradients of one parameter are summed without clipping."""

    clip, scales = dpshard.clipping.closer.clip, []

    def clipped(*arguments, loss_scale, **rest):
        scales.append(loss_scale)
        return clip(*arguments, loss_scale=loss_scale, **rest)

    def summed(self, name):
        clipped = self.sum_weight_B
        if name == of and clipped is not None:
            self.sum_weight_B = torch.where(clipped > 0, torch.full_like(clipped, scales[-1]), clipped)
        SUM(self, name)
        self.sum_weight_B = clipped

    monkeypatch.setattr(dpshard.clipping.closer, "clip", clipped)
    monkeypatch.setattr(GroupTape, "sum", summed)
    monkeypatch.setattr(dpshard.clipping.group_tape, "is_small", lambda record: False)  # joined records skip it


def clip_uses_apart(monkeypatch):
    """Uses of a parameter are measured separately, without inner products of their gradients."""

    def measured(records, method, *, keep, closing):
        parts = [MEASURE([record], method, keep=keep, closing=closing) for record in records]
        return sum(norm_sq_B for norm_sq_B, _ in parts), [record for _, kept in parts for record in kept]

    monkeypatch.setattr(dpshard.clipping.group_tape, "measure", measured)


def shuffle(monkeypatch):
    """Batches are slices of a new permutation each epoch, but accounted as Poisson samples."""

    def draw(self, step):
        size = self.schedule[step]
        epoch, position = divmod(step, self.sample_size // size)
        order = np.random.default_rng(epoch).permutation(self.sample_size)
        return np.sort(order[position * size : (position + 1) * size])

    monkeypatch.setattr(PoissonSampler, "draw", draw)


def count_padding(monkeypatch):
    """Padding rows count as samples."""

    def planned(*arguments, **rest):
        return [replace(plan, is_padding=torch.zeros_like(plan.is_padding)) for plan in PLAN(*arguments, **rest)]

    monkeypatch.setattr(dpshard.sampling.plans, "plan_micro_batches", planned)


# --- noise -----------------------------------------------------------------------------------------------------------


def _replace_noise(monkeypatch, draw):
    """Replace the noise by `draw(noise, shards, step=, std=)`; `noise` has the engine's, one tensor per shard."""

    def release(self, shards, *, step, std, divisor=1.0):
        sums = [shard.local.detach().clone() for shard in shards]
        for shard in shards:
            shard.local.detach().zero_()
        norm = RELEASE(self, shards, step=step, std=std, divisor=1.0)
        noise = draw([shard.local.detach().clone() for shard in shards], shards, step=step, std=std)
        for shard, total, own in zip(shards, sums, noise, strict=True):
            shard.local.detach().copy_((total + own) / divisor)
        return norm

    monkeypatch.setattr(KeyedGaussian, "release_", release)


def divide_noise_twice(monkeypatch):
    """Noise is divided by the batch size before it is added, and again after."""

    def release(self, shards, *, std, divisor=1.0, **rest):
        return RELEASE(self, shards, std=std / divisor, divisor=divisor, **rest)

    monkeypatch.setattr(KeyedGaussian, "release_", release)


def silence(monkeypatch, of):
    """Parameters with this ending get no noise."""
    _replace_noise(
        monkeypatch,
        lambda noise, shards, **_: [z * (not s.name.endswith(of)) for z, s in zip(noise, shards, strict=True)],
    )


def silence_tail(monkeypatch, block=16):
    """Only the first block of a parameter gets noise."""

    def draw(noise, shards, **_):
        for z in noise:
            z.view(-1)[block:] = 0
        return noise

    _replace_noise(monkeypatch, draw)


def weaken_element(monkeypatch):
    """The first element of every parameter gets a fifth of its noise."""

    def draw(noise, shards, **_):
        for z in noise:
            z.view(-1)[0] /= 5
        return noise

    _replace_noise(monkeypatch, draw)


def halve_precision(monkeypatch):
    """Noise is drawn in float16."""
    _replace_noise(monkeypatch, lambda noise, shards, **_: [z.half().to(z.dtype) for z in noise])


def draw_uniform(monkeypatch):
    """Noise has the right deviation, but the wrong distribution."""
    _replace_noise(
        monkeypatch,
        lambda noise, shards, *, std, **_: [(torch.erf(z / std / 2**0.5) * 3**0.5) * std for z in noise],
    )


def share_noise_between_parameters(monkeypatch):
    """Noise is keyed by the shape of a parameter, not its name."""

    def draw(noise, shards, **_):
        first = {}
        return [first.setdefault(z.shape, z) for z in noise]

    _replace_noise(monkeypatch, draw)


def share_noise_between_rows(monkeypatch):
    """All rows of a weight share noise, as in an expanded tensor."""
    _replace_noise(
        monkeypatch, lambda noise, shards, **_: [z[:1].expand_as(z).clone() if z.ndim > 1 else z for z in noise]
    )


def mix_in_noise_of_the_step_before(monkeypatch):
    """Noise is smoothed over steps: the deviation is right, but half cancels in differences."""
    last = {}

    def draw(noise, shards, **_):
        mixed = [(z + last.get(s.name, z)) / 2**0.5 for z, s in zip(noise, shards, strict=True)]
        last.update({s.name: z for z, s in zip(noise, shards, strict=True)})
        return mixed

    _replace_noise(monkeypatch, draw)


def drop_a_weight(monkeypatch):
    """Correlated noise lacks the vector of the step before."""
    _change_vectors(monkeypatch, lambda vectors: (vectors[0], *vectors[2:]))


def redraw_under_another_key(monkeypatch):
    """Correlated noise has fresh vectors where it should have those of earlier steps."""
    _change_vectors(
        monkeypatch,
        lambda vectors: (vectors[0], *(v._replace(secret=derive_key(v.secret, "another")) for v in vectors[1:])),
    )


def forget_a_buffer(monkeypatch):
    """Buffered noise lacks the vector of the step before."""
    init = NoiseBuffers.__init__
    monkeypatch.setattr(NoiseBuffers, "__init__", lambda self, c: init(self, (c[0], 0.0, *c[2:])))


def _change_vectors(monkeypatch, change):
    of_step = NoiseOfRun.of_step

    def changed(self, secret, step, sums):
        found = of_step(self, secret, step, sums)
        return found._replace(noise=replace(found.noise, terms=change(found.noise.terms)))

    monkeypatch.setattr(NoiseOfRun, "of_step", changed)


def draw_by_a_public_seed(monkeypatch):
    """Noise comes from torch's generator, seeded by the script."""
    generators = {}

    def release(self, shards, *, step, std, divisor=1.0):
        generator = generators.setdefault(self.secret, torch.Generator().manual_seed(torch.initial_seed()))
        for shard in shards:
            noise = torch.randn(shard.local.shape, generator=generator, dtype=shard.local.dtype)
            shard.local.detach().add_(noise, alpha=std).div_(divisor)
        return torch.zeros(())

    monkeypatch.setattr(KeyedGaussian, "release_", release)


# --- sums ------------------------------------------------------------------------------------------------------------


def leave_small_parameters_out_of_norms(monkeypatch):
    """Norms omit biases, whether their gradients are joined or few."""
    norm_sq = PerSampleGrad.norm_sq
    monkeypatch.setattr(PerSampleGrad, "norm_sq", lambda self, method: 0 * norm_sq(self, method))


def double_a_threshold(monkeypatch):
    """The first of several groups clips at twice its threshold."""
    clip = Closer._clip

    def clipped(self, measured):
        first, *others = groups = self._scheme.groups
        self._scheme.groups = (replace(first, threshold=2 * first.threshold), *others)
        clip(self, measured)
        self._scheme.groups = groups

    monkeypatch.setattr(Closer, "_clip", clipped)


def count_one_row_of_padding(monkeypatch):
    """The first padding row counts as a sample."""

    def planned(*arguments, **rest):
        plans = []
        for plan in PLAN(*arguments, **rest):
            is_padding = plan.is_padding.clone()
            if plan.samples and is_padding.any():
                is_padding[plan.samples] = False
            plans.append(replace(plan, is_padding=is_padding))
        return plans

    monkeypatch.setattr(dpshard.sampling.plans, "plan_micro_batches", planned)


def _add_earlier_sums(monkeypatch, decay, *, keep):
    """Add `decay` times the kept sums of earlier steps to the sums, before the noise."""
    kept = {}

    def release(self, shards, **rest):
        for shard in shards:
            key = shard.name, shard.start
            own = shard.local.detach().clone()
            if key in kept:
                shard.local.detach().add_(kept[key], alpha=decay)
            kept[key] = shard.local.detach().clone() if keep == "all" else own
        return RELEASE(self, shards, **rest)

    monkeypatch.setattr(KeyedGaussian, "release_", release)


def add_stale_gradients(monkeypatch):
    """The sums of the previous step are not dropped."""
    _add_earlier_sums(monkeypatch, 1.0, keep="last")


def average_before_the_noise(monkeypatch):
    """Momentum applies to clipped sums, before the noise."""
    _add_earlier_sums(monkeypatch, 0.9, keep="all")


def divide_by_realised_size(monkeypatch):
    """The sum is divided by the number of drawn samples."""
    draw, drawn = PoissonSampler.draw, {}

    def drawing(self, step):
        drawn[step] = len(found := draw(self, step))
        return found

    monkeypatch.setattr(PoissonSampler, "draw", drawing)
    monkeypatch.setattr(
        KeyedGaussian,
        "release_",
        lambda self, shards, *, step, divisor, **rest: RELEASE(
            self, shards, step=step, divisor=max(1, drawn[step]), **rest
        ),
    )


# --- samples ---------------------------------------------------------------------------------------------------------


def draw_twice_as_often(monkeypatch):
    """Samples are drawn at twice the accounted probability."""
    draw = PoissonSampler.draw
    monkeypatch.setattr(
        PoissonSampler,
        "draw",
        lambda self, step: draw(replace(self, schedule=type(self.schedule)((2 * self.schedule[step],))), step),
    )


def draw_again_at_the_next_step(monkeypatch):
    """A drawn sample is also in the next batch."""
    draw = PoissonSampler.draw
    monkeypatch.setattr(
        PoissonSampler, "draw", lambda self, step: np.union1d(draw(self, step), draw(self, max(0, step - 1)))
    )


def fix_the_batch_size(monkeypatch):
    """Batches of one size are drawn without replacement."""

    def draw(self, step):
        size = self.schedule[step]
        return np.sort(np.random.default_rng([step, *self.secret]).permutation(self.sample_size)[:size])

    monkeypatch.setattr(PoissonSampler, "draw", draw)


def pair_samples(monkeypatch):
    """Samples are drawn in pairs, as if a unit had two rows."""
    draw = PoissonSampler.draw

    def drawing(self, step):
        half = self.sample_size // 2
        found = draw(self, step)
        found = found[found < half]
        return np.sort(np.concatenate([found, found + half]))

    monkeypatch.setattr(PoissonSampler, "draw", drawing)


def come_once_too_often(monkeypatch):
    """In a fixed order, every batch has a sample of the batch before, too."""
    draw = FixedOrderSampler.draw
    monkeypatch.setattr(
        FixedOrderSampler,
        "draw",
        lambda self, step: np.append(draw(self, step)[:-1], draw(self, max(0, step - 1))[0]) if step else draw(self, 0),
    )


def draw_from_all_groups(monkeypatch):
    """Samples of groups are drawn in each step, as by Poisson sampling."""
    monkeypatch.setattr(
        CyclicPoissonSampler,
        "draw",
        lambda self, step: PoissonSampler(
            self.sample_size, BatchSchedule((self.batch_size,) * (step + 1)), self.secret
        ).draw(step),
    )


def keep_the_bins(monkeypatch):
    """Every epoch has the samples in the same bins."""
    draw = AllocationSampler.draw
    monkeypatch.setattr(AllocationSampler, "draw", lambda self, step: draw(self, step % self.epoch_steps))


def change_the_bins(monkeypatch):
    """Every epoch draws the steps of samples anew, as without correlation."""
    draw = AllocationSampler.draw
    monkeypatch.setattr(AllocationSampler, "draw", lambda self, step: draw(replace(self, one_draw=False), step))
