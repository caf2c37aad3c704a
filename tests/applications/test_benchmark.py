"""The benchmark and `dpshard bench`: turns, ratios, memory of a fresh process, and what is asked of a function."""

import json
import os
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

from dpshard.applications.benchmark import (
    NonPrivate,
    Privacy,
    Private,
    Spread,
    Subject,
    comparison,
    interleave,
    load,
    paired_ratio,
)
from dpshard.applications.benchmark.memory import OutOfMemoryError, in_fresh_process, peak_of
from dpshard.applications.cli import app
from dpshard.applications.flops import FlopMeter
from dpshard.errors import ConfigurationError

MODULE = """
import os
import torch
import torch.nn.functional as F
from torch import nn

def good():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    return model, torch.randn(8, 6), torch.randint(3, (8,)), F.cross_entropy

MODEL = nn.Linear(6, 3)
def same_model(): return MODEL, torch.randn(8, 6), torch.randint(3, (8,)), F.cross_entropy
def mixing(): return nn.Linear(6, 3), torch.randn(8, 6), torch.randn(8, 3), lambda o, y: (o - o.mean(0)).square().mean()
def three(): return nn.Linear(6, 3), torch.randn(8, 6), torch.randn(8, 3)
def no_model(): return 1, torch.randn(8, 6), torch.randn(8, 3), F.mse_loss
def frozen(): return nn.Linear(6, 3).requires_grad_(False), torch.randn(8, 6), torch.randn(8, 3), F.mse_loss
def rows(): return nn.Linear(6, 3), torch.randn(8, 6), torch.randn(7, 3), F.mse_loss
def scalar(): return nn.Linear(6, 3), torch.tensor(1.0), torch.randn(8, 3), F.mse_loss
def no_loss(): return nn.Linear(6, 3), torch.randn(8, 6), torch.randn(8, 3), "mse"
def argument(x): return good()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "measured.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "measured"
    sys.modules.pop("measured", None)


def bench(*arguments, exit_code=0):
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    assert result.exit_code == exit_code, result.output
    return result


def test_contenders_take_turns_and_ratios_are_of_a_round():
    taken = []
    steps = {name: lambda name=name: taken.append(name) for name in "abc"}
    times = interleave(steps, rounds=4, warmup=1)
    assert taken[:3] == ["a", "b", "c"]
    assert [set(taken[i : i + 3]) for i in range(3, 15, 3)] == [{"a", "b", "c"}] * 4
    assert {name: len(seconds) for name, seconds in times.items()} == dict.fromkeys("abc", 4)
    # One slow round slows both: the ratio of medians would be 2.5, that of pairs is 2.
    assert paired_ratio([2, 2.5, 20], [1, 1.25, 10]) == Spread(2, 2, 2, 3)
    assert Spread.of([1, 2, 3, 4, 5]) == Spread(3, 2, 4, 5)


def test_memory_is_that_of_the_step_alone():
    assert 60e6 < in_fresh_process(_peak_of_64_megabytes) < 80e6


def _peak_of_64_megabytes():
    torch.ones(20_000_000).sum()  # 80 MB that belong to no step

    def make():
        kept = torch.ones(8_000_000)  # 32 MB

        def step():
            return (kept + 1).sum()  # 32 MB more

        return step

    return peak_of(make)


def test_a_killed_process_is_an_error_of_memory():
    with pytest.raises(OutOfMemoryError):
        in_fresh_process(os._exit, 9)


def test_flops_are_those_of_the_products():
    layer, x = nn.Linear(30, 20, bias=False), torch.randn(7, 30, requires_grad=True)
    with FlopMeter() as meter:
        layer(x).sum().backward()
    assert meter.flops == 3 * 2 * 7 * 30 * 20


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(4, 2)

    def forward(self, a, b):
        return self.map(a * b)


@pytest.mark.parametrize("kind", [tuple, dict])
def test_inputs_may_be_several_tensors(kind):
    a, b, y = torch.randn(6, 4), torch.randn(6, 4), (torch.randn(6, 2), torch.rand(6))
    x = (a, b) if kind is tuple else {"b": b, "a": a}

    def loss(output, targets):
        return (targets[1] * (output - targets[0]).square().sum(1)).mean()

    private = Private(Subject(TwoInputs(), x, y, loss), Privacy())
    private.verify()
    ordinary = NonPrivate(Subject(TwoInputs(), x, y, loss))
    for training in (private, ordinary):
        before = training.subject.model.map.weight.detach().clone()
        batch = training.step()
        assert len(batch.is_padding) == 6
        assert not torch.equal(before, training.subject.model.map.weight)
    assert private.engine.step == 1


def test_a_model_of_the_users_is_compared_in_every_style(module, tmp_path):
    options = ["--rounds", 2, "--no-memory", "--threads", 1, "--json", "figures.json"]
    threads = torch.get_num_threads()
    try:
        result = bench(f"{module}:good", *options)
    finally:
        torch.set_num_threads(threads)
    for word in ("not private", "all-layer, auto", "all-layer, mixed-ghost", "layer-wise", "Fastest:", "Styles"):
        assert word in result.output
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(figures["measured"]) == 6
    ordinary, private, two_passes, *_ = figures["measured"]
    assert ordinary["ratio"]["median"] == 1
    assert ordinary["flops"] < private["flops"] < two_passes["flops"]
    assert private["ratio"]["count"] == 2


def test_memory_of_a_model_of_the_users(module, monkeypatch):
    monkeypatch.setattr(comparison, "in_fresh_process", lambda function, *arguments: function(*arguments))
    result = bench(f"{module}:good", "--rounds", 2, "--clipping", "layer-wise")
    assert "Least memory: layer-wise, auto" in result.output


def test_a_loss_that_mixes_samples_is_noticed(module):
    assert "error:" in bench(f"{module}:mixing", "--rounds", 2, "--no-memory", exit_code=2).output


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("measured", "names no function"),
        ("nowhere:f", "No module named 'nowhere'"),
        ("measured:f", "has no function f"),
        ("measured:three", "a tuple of 3"),
        ("measured:no_model", "of type int"),
        ("measured:frozen", "no trainable parameter"),
        ("measured:rows", r"\[7, 8\] rows"),
        ("measured:scalar", "not tensors with samples first"),
        ("measured:no_loss", "of type str, not a function"),
        ("measured:argument", "without arguments"),
    ],
)
@pytest.mark.usefixtures("module")
def test_what_is_no_subject_is_refused_with_the_reason(path, words):
    with pytest.raises(ConfigurationError, match=words):
        load(path)()


def test_the_same_model_twice_is_refused(module):
    assert "build a new one" in bench(f"{module}:same_model", "--rounds", 2, exit_code=2).output


def test_options_are_refused(module):
    assert "clipping='nix'" in bench(f"{module}:good", "--clipping", "nix", exit_code=2).output


def test_the_subject_trains_in_training_mode(module):
    subject = load(f"{module}:good")()
    assert subject.model.training
    assert subject.rows == 8
    torch.testing.assert_close(subject.loss(subject.x, subject.y), F.cross_entropy(subject.model(subject.x), subject.y))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_convolution_takes_two_of_itself_backward_whatever_its_groups(groups):
    x = torch.randn(2, 8, 6, 6, requires_grad=True)
    weight = torch.randn(12, 8 // groups, 3, 3, requires_grad=True)
    with FlopMeter() as meter:
        F.conv2d(x, weight, padding=1, groups=groups).sum().backward()
    multiplications = 2 * 36 * 12 * (8 // groups) * 9  # samples, positions, outputs, inputs, kernel
    assert meter.flops == 3 * 2 * multiplications
