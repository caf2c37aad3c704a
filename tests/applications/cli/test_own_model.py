"""`dpshard train --model package.module:function`: a network of the user's own, BatchNorm and all.

Failure modes: 12 test_batch_norm_is_refused_and_replaced_if_asked_to.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dpshard.applications.cli import models
from dpshard.errors import ConfigurationError
from tests.applications.cli.conftest import QUICK

MODULE = """
import math

import torch
from torch import nn


def plain(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 16), nn.Tanh(), nn.Linear(16, classes))


def with_batch_norm(shape, classes):
    return nn.Sequential(
        nn.Conv2d(shape[0], 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, classes),
    )


def of_other_shape(shape, classes):
    return nn.Flatten()


def no_module(shape, classes):
    return classes


class Ragged(nn.Module):
    def forward(self, x):
        return {"logits": x}


def no_tensor(shape, classes):
    return Ragged()


class Mixing(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1) - x.flatten(1).mean(0))


def that_mixes(shape, classes):
    return Mixing(math.prod(shape), classes)


number = 3
"""


@pytest.fixture(autouse=True)
def beside(tmp_path, monkeypatch):
    """A folder with nets/mine.py, in which the command is started."""
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # taken away again, with what was imported from there


def test_a_model_of_ones_own_trains_and_resumes(tmp_path, dpshard):
    dpshard("train", "--model", "nets.mine:plain", *QUICK, "--out", tmp_path / "run")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["model"], report["privacy"]["steps"], report["parameters"]) == ("nets.mine:plain", 6, 1210)
    assert torch.load(tmp_path / "run" / "model.pt").keys() == {"1.weight", "1.bias", "3.weight", "3.bias"}
    (tmp_path / "run" / "report.md").unlink()
    assert "Resuming after step 6" in dpshard("train", "--resume", tmp_path / "run").stdout


def test_batch_norm_is_refused_and_replaced_if_asked_to(tmp_path, dpshard):
    train = ("train", "--model", "nets.mine:with_batch_norm", *QUICK, "--out", tmp_path / "run")
    told = " ".join(dpshard(*train, exit_code=2).stderr.split())
    assert "--replace-unsupported replaces them (1: BatchNorm2d -> GroupNorm(4, 8))" in told
    assert not (tmp_path / "run").exists()
    assert "Replaced 1: BatchNorm2d -> GroupNorm(4, 8)" in dpshard(*train, "--replace-unsupported").stdout
    weights = torch.load(tmp_path / "run" / "model.pt")
    assert not [name for name in weights if "running" in name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nets.other:plain", "nets.other cannot be imported: No module named 'nets.other'"),
        ("nets.mine:missing", "has no function missing"),
        ("nets.mine:number", "has no function number"),
        ("nets.mine:no_module", "returned int, not a torch.nn.Module"),
        ("nets.mine:of_other_shape", "must return the logits, (2, 10)"),
        ("nets.mine:no_tensor", "the model returned dict"),
        ("nets.mine", "choose one of ['auto', 'mlp',"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path, dpshard, name, message):
    told = dpshard("train", "--model", name, *QUICK, "--out", tmp_path / "run", exit_code=2).stderr
    assert message in " ".join(told.split())


def test_ranks_must_begin_with_the_same_weights():
    model = nn.Linear(2, 2)
    alike, apart = (SimpleNamespace(gather=lambda own, other=other: [own, other or own]) for other in ("", "0"))
    models.require_equal(model, "nets.mine:plain", alike)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="different weights on different ranks"):
        models.require_equal(model, "nets.mine:plain", apart)  # type: ignore[arg-type]


def test_a_start_that_is_refused_leaves_no_run_folder(dpshard, tmp_path):
    out = tmp_path / "run"
    result = dpshard("train", "--model", "nets.mine:that_mixes", "--out", out, *QUICK, exit_code=2)
    assert "mixes the samples" in result.output
    assert not out.exists()
