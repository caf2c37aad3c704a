"""What is left open is chosen to fit the data."""

import pytest
import torch
from torch.utils.data import TensorDataset

from dpshard.cli.data import Data, Kind
from dpshard.cli.fitting import fit
from dpshard.cli.settings import resolve
from dpshard.errors import ConfigurationError


def samples(n, kind=Kind.FEATURES):
    split = TensorDataset(torch.zeros(n, 2), torch.zeros(n, dtype=torch.long))
    return Data(train=split, validation=split, test=split, kind=kind, sample="one row", classes=2)


OWN = {"data": "x.csv"}


@pytest.mark.parametrize(("n", "batch_size"), [(1, 1), (210, 105), (5000, 256)])
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
        (Kind.FEATURES, ("mlp", "sgd", 0.5)),
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
    with pytest.raises(ConfigurationError, match=r"\['auto', 'mlp'\]"):
        fit(resolve(OWN, {"model": "gpt"}), samples(20))
