"""fastDP's interface: its settings mean what they mean there, by the oracle.

Failure modes: 1, 2 test_an_update_is_the_oracles.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dpshard.errors import ConfigurationError
from dpshard.integrations.fastdp import PrivacyEngine
from tests.oracle import clipped_mean, gradients_of, per_sample_gradients, randn, relative_error

pytestmark = [
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
    pytest.mark.filterwarnings("ignore:This loop feeds its own batches"),
]

N, D, C, R = 40, 5, 3, 0.6


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, C)).double()


SHARED = {"batch_size": 8, "sample_size": N, "num_steps": 4}
GROUPS = {
    "all-layer": [["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]],
    "layer-wise": [["0.weight", "0.bias"], ["2.weight", "2.bias"], ["4.weight", "4.bias"]],
    "param-wise": [["0.weight"], ["0.bias"], ["2.weight"], ["2.bias"], ["4.weight"], ["4.bias"]],
    "blocks": [["0.weight", "0.bias", "2.weight", "2.bias"], ["4.weight", "4.bias"]],
}


@pytest.mark.parametrize("style", GROUPS)
@pytest.mark.parametrize(
    ("function", "mode", "reduction"),
    [("automatic", "MixOpt", "mean"), ("Abadi", "ghost", "sum"), ("global", "MixGhostClip", "mean")],
)
def test_an_update_is_the_oracles(style, function, mode, reduction):
    model, threshold = mlp(), 1.5 if function == "global" else R  # most samples are above 0.6
    torch.manual_seed(0)
    x, y = randn(7, D), torch.arange(7) % C
    engine = PrivacyEngine(
        model,
        **SHARED,
        noise_multiplier=0,
        max_grad_norm=threshold,
        clipping_fn=function,
        clipping_mode=mode,
        clipping_style=["4", "0"] if style == "blocks" else style,
        loss_reduction=reduction,
        origin_params=None,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine.attach(optimizer)
    for rows in (slice(0, 4), slice(4, 7)):  # accumulation
        F.cross_entropy(model(x[rows]), y[rows], reduction=reduction).backward()
    optimizer.step()
    update = gradients_of(model)
    engine.detach()
    expected = clipped_mean(
        per_sample_gradients(model, (x, y), F.cross_entropy),
        max_grad_norm=1.0 if function == "automatic" else threshold,  # there, too
        batch_size=8 if reduction == "mean" else 1,
        clipping_fn=function.lower(),
        groups=GROUPS[style],
    )
    assert relative_error(update, expected) < 1e-10


def test_a_run_draws_its_batches_and_tells_what_it_spent():
    model = mlp()
    data = TensorDataset(randn(N, D), torch.arange(N) % C)
    engine = PrivacyEngine(model, batch_size=8, sample_size=N, epochs=2, target_epsilon=8.0)
    assert engine.mechanism.target_delta == 1 / (2 * N)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    engine.attach(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for logical_batch in optimizer.privacy_engine.batches(data, micro_batch_size=4):
            for x, y in logical_batch:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert engine.step == 10
    assert 7.9 < optimizer.get_privacy_spent()["eps_rdp"] <= 8.0
    assert optimizer.get_training_stats()["gradient_snr"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clipping_mode": "opacus"}, "MixGhostClip"),
        ({"clipping_fn": "none"}, "Abadi"),
        ({"accounting_mode": "all"}, "glw"),
        ({"clipping_style": ["head"]}, "no such layer"),
        ({"clipping_style": ["4"]}, "0.weight comes before"),
    ],
)
def test_unknown_settings_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        PrivacyEngine(mlp(), **SHARED, noise_multiplier=1.0, **settings)
    with pytest.raises(TypeError, match="gamma"):
        PrivacyEngine(mlp(), **SHARED, noise_multiplier=1.0, gamma=1)


def test_an_optimizer_of_another_model_is_refused():
    engine = PrivacyEngine(mlp(), **SHARED, noise_multiplier=1.0)
    with pytest.raises(ConfigurationError, match="no parameter of the engine"):
        engine.attach(torch.optim.SGD(mlp().parameters(), lr=0.1))
