"""Mixing that is switched on between two verified steps: by an argument, a setting, a hook, or another sub-module.

Steps 0, 1, 2, 4, 8 are verified. The switch is thrown at step 3, and later. Failure mode 12.
"""

import dataclasses
import enum
import functools
import types

import numpy as np
import pytest
import torch
from torch import nn

from dpshard import PrivacyEngine
from dpshard.errors import UnsupportedParameterError, VerificationError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This loop feeds its own batches"),
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
]

B, D = 8, 3
REFUSED = (VerificationError, UnsupportedParameterError)


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


def normal():
    return 10 * torch.randn(B, D, generator=torch.Generator().manual_seed(1))


def engine_on(model):
    engine = PrivacyEngine(model, batch_size=B, sample_size=B, steps=100, noise_multiplier=0, max_grad_norm=1.0)
    engine._secret = bytes(range(32))
    return engine


def steps_until_refused(model, forward, n):
    """Return how many of n steps are released before one is refused."""
    engine = engine_on(model)
    for step in range(n):
        try:
            forward(model, step).square().mean().backward()
            engine.privatize()
        except REFUSED:
            return step
        model.zero_grad()
    return n


def counted(model, forward, n):
    """Return the number of verifications in n steps."""
    seen = []
    engine = engine_on(model)
    plain = engine._verifier.verify
    engine._verifier.verify = lambda *a, **k: (seen.append(1), plain(*a, **k))
    for step in range(n):
        forward(model, step).square().mean().backward()
        engine.privatize()
        model.zero_grad()
    return len(seen)


def mixed(x):
    return 0.6 * x + 0.4 * x.flip(0)


# --- arguments --------------------------------------------------------------------------------------------------------


class Phase(enum.Enum):
    PLAIN = 0
    MIXED = 1


@dataclasses.dataclass
class Settings:
    mix: bool
    weight: float = 0.5


@dataclasses.dataclass(slots=True)
class Slotted:
    mix: bool


def as_closure(on):
    return lambda x: mixed(x) if on else x


def as_partial(on):
    return functools.partial(lambda x, on: mixed(x) if on else x, on=on)


ARGUMENTS = {
    "numpy's integer": (np.int64, lambda a: a == 1),
    "numpy's float": (np.float32, lambda a: a == 1),
    "numpy's bool": (np.bool_, bool),
    "a tensor": (torch.tensor, bool),
    "an enum": (Phase, lambda a: a is Phase.MIXED),
    "a dataclass": (lambda on: Settings(bool(on)), lambda a: a.mix),
    "a dataclass of slots": (lambda on: Slotted(bool(on)), lambda a: a.mix),
    "a namespace": (lambda on: types.SimpleNamespace(inner={"mix": bool(on)}), lambda a: a.inner["mix"]),
    "a set": (lambda on: {"mix"} if on else set(), bool),
    "bytes": (lambda on: b"mix" if on else b"", bool),
    "a range": (range, len),
    "an array": (np.array, bool),
    "a tensor of one element": (lambda on: torch.tensor([on]), bool),
    "a closure": (as_closure, None),
    "a partial": (as_partial, None),
}


class Argued(nn.Module):
    """Mixes if an argument is set."""

    def __init__(self, says):
        super().__init__()
        self.net = nn.Linear(D, 2)
        self.says = says

    def forward(self, x, argument):
        if self.says is None:
            return self.net(argument(x))
        return self.net(mixed(x) if self.says(argument) else x)


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_an_argument_that_switches_mixing_on_is_refused_where_it_does(argument):
    make, says = ARGUMENTS[argument]
    assert steps_until_refused(Argued(says), lambda m, step: m(normal(), make(int(step == 3))), 4) == 3


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_an_argument_that_says_the_same_is_verified_once(argument):
    make, says = ARGUMENTS[argument]
    assert counted(Argued(says), lambda m, _: m(normal(), make(0)), 4) == 3  # steps 0, 1, 2


def test_an_object_that_forward_writes_to_passes():
    class Writing(Argued):
        def forward(self, x, argument):
            argument.calls = getattr(argument, "calls", 0) + 1
            return self.net(x)

    argument = types.SimpleNamespace()
    assert steps_until_refused(Writing(None), lambda m, _: m(normal(), argument), 6) == 6


# --- what hangs on the model ------------------------------------------------------------------------------------------


class Switched(nn.Module):
    """Mixes if an attribute or object within is set."""

    def __init__(self):
        super().__init__()
        self.first, self.net = nn.Sequential(nn.Identity()), nn.Linear(D, 2)
        self.config, self.options = types.SimpleNamespace(mix=False, inner=[{"mix": False}]), {"mix": False}
        self.temperature, self.flag, self.function = 1.0, False, torch.tanh

    def forward(self, x):
        x = self.first(x)
        on = self.config.mix or self.config.inner[0]["mix"] or self.options["mix"] or self.flag
        return self.net(mixed(x) if on else x) * self.temperature


SWITCHES = {
    "a nested attribute": lambda m: setattr(m.config, "mix", True),
    "a deep value": lambda m: m.config.inner[0].update(mix=True),
    "another deep object": lambda m: m.config.inner.__setitem__(0, {"mix": True}),
    "a value in a dict": lambda m: m.options.update(mix=True),
    "another sub-module": lambda m: setattr(m, "first", nn.BatchNorm1d(D, affine=False, track_running_stats=False)),
    "another inner sub-module": lambda m: m.first.__setitem__(0, nn.BatchNorm1d(D, affine=False)),
    "one more inner sub-module": lambda m: m.first.append(nn.BatchNorm1d(D, affine=False)),
    "a hook": lambda m: m.first[0].register_forward_hook(lambda *a: mixed(a[2])),
    "a hook before": lambda m: m.first[0].register_forward_pre_hook(lambda _, a: (mixed(a[0]),)),
    "another forward": lambda m: setattr(m.first[0], "forward", mixed),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_between_verified_steps_is_refused_where_it_is_thrown(switch):
    def forward(model, step):
        if step == 3:
            SWITCHES[switch](model)
        return model(normal())

    assert steps_until_refused(Switched(), forward, 4) == 3


def test_a_flag_is_seen_when_a_ramp_has_used_its_ration_up():
    def forward(model, step):
        model.temperature, model.flag = 0.5**step, step >= 23
        model.config.heat = 0.5**step
        return model(normal())

    assert steps_until_refused(Switched(), forward, 24) == 23


def test_a_counter_does_not_hide_a_switch_that_begins_with_its_name():
    class Counting(Switched):
        def __init__(self):
            super().__init__()
            self.f = 0

        def forward(self, x):
            self.f += 1
            return super().forward(x)

    def forward(model, step):
        model.flag = step == 3
        return model(normal())

    assert steps_until_refused(Counting(), forward, 4) == 3


def test_settings_that_change_honestly_are_verified_a_few_times():
    def forward(model, step):
        model.options["step"], model.config.rate, model.config.losses = step, 0.9**step, [0.1 * step] * 3
        model.options.setdefault("log", []).append({"loss": 2.0**-step})
        handle = model.first[0].register_forward_hook(lambda *_: None)
        output = model(normal())
        handle.remove()
        model.function = lambda x: x + 1
        return output

    assert counted(Switched(), forward, 40) < 40


def test_an_ordinary_step_of_a_model_that_stays_itself_has_no_news():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(D, D), nn.Dropout(0.1)) for _ in range(3)])
    assert counted(model, lambda m, _: m(normal()), 8) == 4  # steps 0, 1, 2, 4
