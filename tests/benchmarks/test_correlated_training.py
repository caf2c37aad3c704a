"""The training with correlated noise plans runs at equal epsilon, and learns."""

import pytest
import torch

from benchmarks import correlated_training as training
from dpshard.accounting import epsilon_of
from tests.coarse import coarse


@pytest.mark.exhaustive
def test_digits_are_learnt_at_the_planned_epsilon():
    task = training.digits()
    with coarse():
        run = training.planned(task, 8.0, 1, *training.MECHANISMS["BandMF"])
        assert 7.9 < epsilon_of(run.releases(), training.DELTA, "pld") <= 8
    assert run.noise_correlation is not None
    assert training.train(task, run, 0.2, 0, task.test) > 0.4


def test_the_language_model_sees_no_byte_that_it_predicts():
    x = torch.randint(training.VOCABULARY, (2, training.LENGTH))
    model = training.ByteModel()
    torch.nn.init.normal_(model.head.weight)
    changed = x.clone()
    changed[:, 9] = (x[:, 9] + 1) % training.VOCABULARY
    differs = (model(x) != model(changed)).any(2)
    assert not differs[:, :9].any()
    assert differs[:, 9].all()
