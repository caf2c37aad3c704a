"""Losses of single samples.

Failure modes: 6 test_what_is_ignored_has_no_gradient; 12 test_a_loss_does_not_depend_on_the_other_samples.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpshard.errors import ConfigurationError, VerificationError
from dpshard.losses import sample_losses
from tests.oracle import TOLERANCE, clipped_mean, noise_free_engine, per_sample_gradients, private_step, relative_error

B, T, C = 4, 5, 7
LABELS = torch.randint(0, C, (B, T), generator=torch.Generator().manual_seed(0))
LABELS[0, 1:] = -100  # one token
LABELS[1, ::2] = -100
LABELS[2] = -100  # none


def logits(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("per", ["sample-mean", "sample-sum"])
def test_values_are_those_of_each_sample_alone(per):
    x = logits(B, T, C)
    found = sample_losses(x, LABELS, per=per)
    assert found.shape == (B,)
    for i in range(B):
        kept = LABELS[i] != -100
        tokens = F.cross_entropy(x[i][kept], LABELS[i][kept], reduction="none")
        expected = tokens.sum() if per == "sample-sum" or not kept.any() else tokens.mean()
        torch.testing.assert_close(found[i], expected)


@pytest.mark.parametrize("per", ["sample-mean", "sample-sum"])
def test_a_loss_does_not_depend_on_the_other_samples(per):
    x = logits(B, T, C)
    together = sample_losses(x, LABELS, per=per)
    alone = torch.cat([sample_losses(x[i : i + 1], LABELS[i : i + 1], per=per) for i in range(B)])
    torch.testing.assert_close(together, alone)


def test_what_is_ignored_has_no_gradient():
    x = logits(B, T, C)
    (gradient,) = torch.autograd.grad(sample_losses(x, LABELS).sum(), x)
    assert ((gradient != 0).any(2) == (LABELS != -100)).all()


def test_classes_and_images_and_another_ignored_label():
    x, y = logits(B, C), torch.arange(B)
    torch.testing.assert_close(sample_losses(x, y), F.cross_entropy(x, y, reduction="none"))
    x, y = logits(B, 2, 3, C), torch.randint(0, C, (B, 2, 3), generator=torch.Generator().manual_seed(2))
    per_pixel = F.cross_entropy(x.movedim(-1, 1), y, reduction="none")
    torch.testing.assert_close(sample_losses(x, y, per="sample-sum"), per_pixel.sum((1, 2)))
    assert float(sample_losses(x, torch.full_like(y, 3), ignore_index=3).detach().abs().sum()) == 0


def test_half_precision_sums_in_float32():
    x = torch.zeros(1, 1000, 2, dtype=torch.bfloat16)
    total = sample_losses(x, torch.zeros(1, 1000, dtype=torch.long), per="sample-sum")
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, torch.tensor([1000 * 0.693147]), rtol=1e-5, atol=0)


def test_wrong_shapes_and_words_are_refused():
    with pytest.raises(ConfigurationError, match=r"\(4, 7, 5\).*\[B, T, C\]"):
        sample_losses(logits(B, T, C).mT, LABELS)
    with pytest.raises(ConfigurationError, match="'sample-mean' or 'sample-sum'"):
        sample_losses(logits(B, T, C), LABELS, per="token-mean")


def language_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(C, 6), nn.Linear(6, C)).double()


@pytest.mark.parametrize("per", ["sample-mean", "sample-sum"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_training_with_it_is_exact(per, reduction):
    def loss(output, labels):
        losses = sample_losses(output, labels, per=per)
        return losses.mean() if reduction == "mean" else losses.sum()

    ids = torch.randint(0, C, (B, T), generator=torch.Generator().manual_seed(3))
    per_sample = per_sample_gradients(language_model(), (ids, LABELS), loss)
    expected = clipped_mean(per_sample, max_grad_norm=0.3, batch_size=B)
    update = private_step(language_model(), (ids, LABELS), loss, max_grad_norm=0.3, loss_reduction=reduction)
    assert relative_error(update, expected) <= TOLERANCE


def test_verification_passes_it_and_not_the_mean_over_tokens():
    ids = torch.randint(0, C, (B, T), generator=torch.Generator().manual_seed(3))
    engine = noise_free_engine(language_model(), batch_size=B)
    engine.verify(ids, loss_fn=lambda output, y: sample_losses(output, y).mean(), targets=LABELS)
    with pytest.raises(VerificationError, match="token-mean or load-balancing loss"):
        engine.verify(ids, loss_fn=lambda output, y: F.cross_entropy(output.mT, y), targets=LABELS)
