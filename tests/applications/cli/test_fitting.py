"""What is left open is chosen to fit the data."""

import pytest
import torch
from torch.utils.data import TensorDataset

from dpshard.applications.cli.data import Data, Kind
from dpshard.applications.cli.fitting import fit
from dpshard.applications.cli.settings import PRESETS, resolve
from dpshard.applications.cli.sharding import make_optimizer
from dpshard.applications.cli.training import make_scheduler
from dpshard.errors import ConfigurationError
from dpshard.recipes import DP_BERT


def samples(n, kind=Kind.FEATURES):
    split = TensorDataset(torch.zeros(n, 2), torch.zeros(n, dtype=torch.long))
    return Data(train=split, validation=split, test=split, kind=kind, sample="one row", classes=2)


OWN = {"data": "x.csv"}


@pytest.mark.parametrize(("n", "batch_size"), [(1, 1), (210, 105), (5000, 2500), (20_000, 4096)])
def test_a_batch_is_at_most_half_of_few_data(n, batch_size):
    assert fit(resolve(OWN), samples(n)).batch_size == batch_size


def test_what_was_given_stays():
    given = {"batch_size": 7, "learning_rate": 0.125, "optimizer": "adamw", "model": "vit"}
    fitted = fit(resolve(OWN, given), samples(20, Kind.IMAGE))
    assert {name: getattr(fitted, name) for name in given} == given
    assert fit(resolve(OWN, {"phases": "4x2"}), samples(20)).batch_size is None


@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        (Kind.FEATURES, ("mlp", "adamw", 0.03)),
        (Kind.NUMBERS, ("mlp", "adamw", 0.01)),
        (Kind.IMAGE, ("cnn", "sgd", 0.5)),
        (Kind.TEXT, ("text", "adam", 0.003)),
    ],
)
def test_own_data_get_a_model_an_optimizer_and_its_learning_rate(kind, chosen):
    fitted = fit(resolve(OWN), samples(20, kind))
    assert (fitted.model, fitted.optimizer, fitted.learning_rate) == chosen
    assert fit(resolve(OWN, {"optimizer": "adam"}), samples(20, kind)).learning_rate == 0.003


def test_a_batch_larger_than_the_data_is_refused_before_a_model_is_built():
    with pytest.raises(ConfigurationError, match=r"batch_size 21 is larger than the data set \(sample_size=20\)"):
        fit(resolve(OWN, {"batch_size": 21}), samples(20))


def test_a_model_that_does_not_fit_is_refused_with_those_that_do():
    with pytest.raises(ConfigurationError, match=r"\['auto', 'mlp', 'linear'\]"):
        fit(resolve(OWN, {"model": "gpt"}), samples(20))


def test_the_preset_is_the_recipe():
    preset, engine = PRESETS["dp-bert"], DP_BERT.engine_settings()
    for name in ("max_grad_norm", "clipping_fn"):
        assert preset[name] == engine[name]
    for name in ("learning_rate", "weight_decay"):
        assert preset[name] == getattr(DP_BERT, name)


def test_the_batches_of_the_preset_grow_with_the_data():
    fitted = fit(resolve({"recipe": "dp-bert"}), samples(2000, Kind.MASKED))
    assert (fitted.model, fitted.phases) == ("bert", "125x30,219x30,312x30,406x30,500x280")
    given = fit(resolve({"recipe": "dp-bert", "batch_size": 64, "weight_decay": 0.5}), samples(2000, Kind.MASKED))
    assert (given.batch_size, given.steps, given.phases, given.weight_decay) == (64, 400, None, 0.5)
    assert fit(resolve({"recipe": "dp-bert", "epochs": 2}), samples(2000, Kind.MASKED)).batch_size == 256


def test_the_optimizer_and_learning_rates_of_the_preset():
    settings = fit(resolve({"recipe": "dp-bert", "steps": 80}), samples(2000, Kind.MASKED))
    optimizer = make_optimizer(torch.nn.Linear(2, 2), settings)
    assert isinstance(optimizer, torch.optim.AdamW)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (6.0902e-4, (0.75, 0.9), 1e-11, 1.0)
    scheduler, factors = make_scheduler(optimizer, settings, 80), []
    for _ in range(80):
        factors.append(scheduler.get_last_lr()[0] / 6.0902e-4)
        optimizer.step()
        scheduler.step()
    assert factors[29] == factors[30] == max(factors) == 1
    assert factors[55] == pytest.approx(1 / 4)


def test_masks_are_for_texts_without_labels():
    with pytest.raises(ConfigurationError, match="texts without labels"):
        fit(resolve({"recipe": "dp-bert"}), samples(20, Kind.IMAGE))
