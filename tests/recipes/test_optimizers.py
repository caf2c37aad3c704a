"""The optimizers of the recipes, against the algorithms of the papers written out."""

import pytest
import torch
from torch.testing import assert_close

from dpshard import PrivacyEngine
from dpshard.errors import ConfigurationError
from dpshard.recipes import DP_BERT, AdamBC

STEPS = 6


def gradients():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def run(optimizer, parameter):
    for gradient in gradients():
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def parameter():
    return torch.nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))


def test_the_optimizer_of_dp_bert_is_algorithm_1():
    """Anil et al. 2021, Alg. 1, at the settings of Table 1; its decay acts on the parameter before the step."""
    p = parameter()
    found = run(DP_BERT.optimizer([p]), p)
    theta, m, v = parameter().detach(), torch.zeros(5), torch.zeros(5)
    for t, g in enumerate(gradients(), 1):
        m, v = 0.75 * m + 0.25 * g, 0.9 * v + 0.1 * g**2
        m_hat, v_hat = m / (1 - 0.75**t), v / (1 - 0.9**t)
        theta = theta - 6.0902e-4 * (m_hat / (v_hat.sqrt() + 1e-11) + 1.0 * theta)
    assert_close(found, theta)


def test_adam_bc_is_the_algorithm_of_its_paper():
    """Tang et al. 2023, Alg. 1: one batch size."""
    p = parameter()
    found = run(AdamBC([p], noise_std=lambda: 0.5, lr=0.01, betas=(0.8, 0.95), floor=0.04, weight_decay=0.1), p)
    theta, m, v = parameter().detach(), torch.zeros(5), torch.zeros(5)
    for t, g in enumerate(gradients(), 1):
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
        m_hat, v_hat = m / (1 - 0.8**t), v / (1 - 0.95**t)
        theta = theta - 0.01 * (m_hat / (v_hat - 0.25).clamp(min=0.04).sqrt() + 0.1 * theta)
    assert_close(found, theta)


def test_adam_bc_finds_the_second_moment_of_the_signal_though_the_noise_changes():
    """v - n is an unbiased estimate of E[g^2], also if every step has other noise; false alarms: below 1e-6."""
    stds, signal, generator = [4.0, 1.0, 2.0, 0.5], 3.0, torch.Generator().manual_seed(1)
    p = torch.nn.Parameter(torch.zeros(400_000, dtype=torch.float64))
    now = iter(stds)
    optimizer = AdamBC([p], noise_std=lambda: next(now), betas=(0.0, 0.7), lr=1.0)
    for std in stds:
        p.grad = signal + std * torch.randn(p.shape, generator=generator, dtype=torch.float64)
        optimizer.step()
    state = optimizer.state[p]
    estimates = (state["exp_avg_sq"] - state["noise_sq"]) / (1 - 0.7 ** len(stds))
    error = float(estimates.mean()) - signal**2
    assert abs(error) < 5 * float(estimates.std()) / len(p) ** 0.5 < 0.2


def test_without_noise_adam_bc_is_adamw():
    p, q = parameter(), parameter()
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}
    ours = run(AdamBC([p], noise_std=lambda: 0.0, floor=1e-30, **settings), p)
    assert_close(ours, run(torch.optim.AdamW([q], eps=1e-15, **settings), q))


def test_adam_bc_learns_the_noise_of_each_release_from_the_engine():
    model = torch.nn.Linear(3, 1)
    engine = PrivacyEngine(
        model, batch_size=[(4, 1), (8, 1)], sample_size=20, noise_multiplier=1.5, max_grad_norm=0.1, verify=False
    )
    optimizer = DP_BERT.optimizer(model.parameters(), noise_std=lambda: engine.gradient_noise_std)
    data = torch.utils.data.TensorDataset(torch.randn(20, 3))
    for logical_batch in engine.batches(data, 4):
        for (x,) in logical_batch:
            model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    first, second = (1.5 * 0.1 / 4) ** 2, (1.5 * 0.1 / 8) ** 2
    noise_sq = float(optimizer.state[model.weight]["noise_sq"])
    assert noise_sq == pytest.approx(0.9 * 0.1 * first + 0.1 * second, rel=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0.0},
        {"lr": float("nan")},
        {"floor": 0.0},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9,)},
        {"betas": 0.9},
        {"weight_decay": -1.0},
        {"weight_decay": float("inf")},
        {"noise_std": 0.5},
    ],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        AdamBC([parameter()], **{"noise_std": lambda: 0.0} | wrong)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -0.5])
def test_a_noise_that_is_no_deviation_is_refused(wrong):
    p = parameter()
    with pytest.raises(ConfigurationError, match="finite"):
        run(AdamBC([p], noise_std=lambda: wrong), p)
