"""What runs beside the forwards of a model: hooks of the module that is called, and code between parts of it.

It was not verified: hooks that normalise by the batch counted one sample up to 3.3 times, code between two parts 3.7
times. Now hooks are part of the forward, and what a part gets must be rows of what another has returned.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tests.attacks.oracle import ALLOWED, influence, is_refused

N, D, H, C = 10, 3, 8, 2
X = 10 * torch.randn(N, D, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, torch.arange(N) % C)


def loop_of(loss, *, micro=5, **options):
    def loop(model, engine, optimizer, dataset):
        for logical_batch in engine.batches(dataset, micro, **options):
            for x, y in logical_batch:
                loss(model, x, y).backward()
            optimizer.step()

    return loop


def whole(model, x, y):
    return F.cross_entropy(model(x), y)


def by_parts(model, x, y):
    return model.training_step(x, y)


def exact(build, loss, **options):
    found = influence(build, loop_of(loss, **options), DATA, left_out=(0, 3))
    assert 0.5 < found <= ALLOWED


# --- hooks ----------------------------------------------------------------------------------------------------------


def hooked(pre=None, post=None):
    def build():
        model = nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, C))
        if pre is not None:
            model.register_forward_pre_hook(lambda _, args: pre(args[0]))
        if post is not None:
            model.register_forward_hook(lambda _, args, output: post(output))
        return model

    return build


def normalised(x):
    return (x - x.mean(0)) / x.std(0)


@pytest.mark.parametrize("where", ["pre", "post"])
def test_a_hook_of_the_model_that_normalises_by_the_batch_is_refused(where):
    assert "mixes the samples" in is_refused(hooked(**{where: normalised}), loop_of(whole), DATA)


def of_the_batch(module, gradients):
    return tuple(4 * g / g.norm() for g in gradients)


def test_a_hook_that_normalises_gradients_by_the_batch_is_refused():
    def build():
        model = nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, C))
        model.register_full_backward_pre_hook(of_the_batch)
        return model

    assert "gradients of" in is_refused(build, loop_of(whole), DATA)


def test_a_hook_of_all_modules_that_centres_the_outermost_is_refused():
    def centred(module, _, output):
        return output - output.mean(0) if type(module) is nn.Sequential else None

    handle = nn.modules.module.register_module_forward_hook(centred)
    try:
        assert is_refused(hooked(), loop_of(whole), DATA)
    finally:
        handle.remove()


def test_a_hook_that_is_registered_after_the_engine_is_refused_if_it_mixes():
    def loop(model, engine, optimizer, dataset):
        model.register_forward_hook(lambda _, args, output: normalised(output))
        loop_of(whole)(model, engine, optimizer, dataset)

    assert "mixes the samples" in is_refused(hooked(), loop, DATA)


def test_a_hook_of_a_part_that_is_called_is_verified_or_refused():
    def loop(model, engine, optimizer, dataset):
        model[0].register_forward_hook(lambda _, args, output: normalised(output))
        loop_of(lambda model, x, y: F.cross_entropy(model[2](model[0](x)), y))(model, engine, optimizer, dataset)

    assert "Register it before" in is_refused(hooked(), loop, DATA)


def test_hooks_that_keep_to_a_row_or_watch_are_exact():
    seen = []
    exact(hooked(pre=lambda x: x / 2, post=lambda output: 3 * output), whole)
    exact(hooked(pre=lambda x: seen.append(x.shape), post=lambda output: seen.append(output.shape)), whole, micro=4)
    assert seen


def test_hooks_with_keywords_and_of_every_call_are_exact():
    def build():
        model = hooked()()
        model.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs), with_kwargs=True)
        model.register_forward_hook(lambda _, args, output: None, always_call=True)
        return model

    exact(build, whole)


# --- code between parts ---------------------------------------------------------------------------------------------


class Centre(nn.Module):
    def forward(self, h):
        return 5 * (h - h.mean(0))


class Parts(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(D, H), nn.Tanh()), nn.Linear(H, C)
        self.between = between

    def training_step(self, x, y):
        return F.cross_entropy(self.head(self.between(self.encoder(x))), y)


def parts(between):
    return lambda: Parts(between)


@pytest.mark.parametrize("micro", [5, 6])
@pytest.mark.parametrize(
    "between",
    [
        lambda h: h - h.mean(0),
        lambda h: 5 * F.batch_norm(h, None, None, training=True),
        lambda h: (h @ h.t()).softmax(1) @ h,
        lambda h: 0.6 * h + 0.4 * h.roll(2, 0),
        lambda h: (h - h.mean(0).detach()).relu(),
        lambda h: h.mean(0, keepdim=True).expand_as(h),
        lambda h: h.t().reshape(h.shape),
        Centre(),
        lambda h: h + h.mean(0, keepdim=True),
        lambda h: h * h.softmax(0),
        lambda h: h + h.flip(0),
        lambda h: F.normalize(h, dim=0),
        lambda h: F.layer_norm(h, h.shape),
        lambda h: torch.cat([h[1:], h[:1]]),
        lambda h: torch.stack([h, h.tanh()])[0],
        lambda h: torch.cat([h[:, : len(h)] + h[:, 0], h[:, len(h) :]], 1),
        lambda h: h / h.std().item(),
    ],
)
def test_code_between_parts_that_may_mix_is_refused(between, micro):
    message = is_refused(parts(between), loop_of(by_parts, micro=micro), DATA)
    assert "forward of one module" in message


@pytest.mark.parametrize("micro", [5, 6])
@pytest.mark.parametrize(
    "between",
    [
        lambda h: h,
        torch.relu,
        nn.GELU(),
        lambda h: h.unflatten(1, (2, 4)).flatten(1).sigmoid(),
        lambda h: h.unsqueeze(1)[:, 0],
        lambda h: h[:, None].mean(1),
        lambda h: h + h.sigmoid() * h.softmax(1),
        lambda h: h - h.mean(1, keepdim=True),
        lambda h: F.layer_norm(h, (H,)),
        lambda h: F.normalize(h, dim=-1),
        lambda h: torch.cat([h[:, :4], h[:, :3].tanh(), torch.ones(len(h), 1)], dim=-1),
        lambda h: torch.stack([h, h.tanh()], 1).sum(1),
    ],
)
def test_what_keeps_to_a_row_is_exact(between, micro):
    exact(parts(between), by_parts, micro=micro)


class Turned(nn.Linear):
    def forward(self, x):
        return super().forward(x).transpose(0, 1)


@pytest.mark.parametrize("between", [lambda h: h.sum(1), lambda h: h.mean(1), lambda h: h.softmax(1)[:, 0]])
def test_sums_over_the_second_dimension_are_refused_where_positions_come_first(between):
    """T = B: [T, B, H] looks like [B, T, H]."""

    def build():
        model = Parts(between)
        model.encoder = Turned(D, H)
        return model

    texts = TensorDataset(torch.randn(N, 5, D, generator=torch.Generator().manual_seed(2)), torch.arange(N) % C)
    assert is_refused(build, loop_of(by_parts, micro=5), texts)


@pytest.mark.parametrize(
    ("statistic", "reason"),
    [(torch.mean, "has no row per sample"), (lambda h: h.mean(0), "mixes the samples")],
)
def test_a_statistic_of_the_batch_that_a_part_returns_is_refused(statistic, reason):
    class Encoder(nn.Sequential):
        def forward(self, x):
            h = super().forward(x)
            return h, statistic(h)

    class Statistics(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = Encoder(nn.Linear(D, H), nn.Tanh()), Shifted(H, C)

        def training_step(self, x, y):
            return F.cross_entropy(self.head(*self.encoder(x)), y)

    class Shifted(nn.Linear):
        def forward(self, h, shift):
            return super().forward(h - shift.mean())

    assert reason in is_refused(Statistics, loop_of(by_parts), DATA)


def test_a_part_that_gets_what_was_detached_is_exact():
    """The head by itself, and the encoder by its own loss."""

    def apart(model, x, y):
        h = model.encoder(x)
        return F.cross_entropy(model.head(h.detach()), y) + h.square().mean()

    exact(parts(None), apart)


def test_inputs_that_do_not_depend_on_other_parts_may_come_from_anywhere():
    outside = nn.Linear(D, D)

    def two_views(model, x, y):
        return F.cross_entropy(model(x), y) + F.cross_entropy(model(outside(x)), y)

    exact(hooked(), two_views)
