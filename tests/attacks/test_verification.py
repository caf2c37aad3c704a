"""What mixes samples now and then, a little, or late: refused before the release of the batch in which it is met.

Each attack is a model or a loss that passes a look at the first three samples of the first micro-batch.
Failure mode 12.
"""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dpshard import DpshardError, PrivacyEngine
from dpshard.errors import BatchLayoutError, UnsupportedParameterError, VerificationError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This loop feeds its own batches"),
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
]

B, T, D, V = 16, 6, 4, 11
REFUSED = (VerificationError, UnsupportedParameterError, BatchLayoutError)


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def engine_on(model, **options):
    engine = PrivacyEngine(
        model, batch_size=B, sample_size=B, steps=100, noise_multiplier=0, max_grad_norm=1.0, **options
    )
    engine._secret = bytes(range(32))
    return engine


def steps_until_refused(model, forward, n):
    """Return how many of n steps of a user's own loop are released before one is refused."""
    engine = engine_on(model)
    for step in range(n):
        try:
            forward(model, step).backward()
            engine.privatize()
        except REFUSED:
            return step
        model.zero_grad()
    return n


class Mixing(nn.Module):
    """Two linear maps with a function of (module, hidden units [B, D]) between them."""

    def __init__(self, mix):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, 3)
        self.mix = mix
        self.calls = 0

    def forward(self, x, *args):
        self.calls += 1
        return self.second(self.mix(self, self.first(x), *args))


def centred(h):
    return h - h.mean(0)


# --- functions that mix -----------------------------------------------------------------------------------------------


def mixup(h, weight):
    return weight * h + (1 - weight) * h[torch.randperm(len(h)).tolist()]


def mix_style(h):
    if random.random() > 0.5:
        return h
    mean, deviation = h.mean(1, keepdim=True).detach(), h.std(1, keepdim=True).detach() + 1
    other = torch.randperm(len(h)).tolist()
    weight = torch.distributions.Beta(0.1, 0.1).sample((len(h), 1))
    share = weight * mean + (1 - weight) * mean[other]
    return (h - mean) / deviation * (weight * deviation + (1 - weight) * deviation[other]) + share


def quantised(h):
    with torch.autocast("cpu", enabled=False):
        scale = h.detach().float().abs().max() / 127
        return h + ((h / scale).round() * scale - h).detach()


MIXING = {
    "mixup now and then": lambda _, h: mixup(h, 0.7) if torch.rand(1) < 0.2 else h,
    "mixup by python": lambda _, h: mixup(h, 0.7) if random.random() < 0.2 else h,
    "mixup by numpy": lambda _, h: mixup(h, 0.7) if np.random.rand() < 0.2 else h,  # noqa: NPY002
    "mixup when the draw is large": lambda _, h: mixup(h, 0.7) if torch.rand(1) > 0.9 else h,
    "batch maximum": lambda _, h: h / h.detach().abs().max().clamp(min=1e3) * 1e3,
    "standardisation from 8 rows on": lambda _, h: (h - h.mean(0)) / h.std(0) if len(h) >= 8 else h,
    "a term of 1e-5 with an outlier": lambda _, h: h + 1e-5 * h.mean(0).square(),
    "one scale of quantisation": lambda _, h: quantised(h),
    "capacity": lambda _, h: h * ((h[:, 0] > 0).cumsum(0) <= 5)[:, None],
    "neighbours": lambda _, h: h + 0.1 * h.detach().roll(1, 0),
}


@pytest.mark.parametrize("mixing", MIXING)
def test_a_model_that_mixes_samples_now_and_then_is_refused(mixing):
    model = Mixing(MIXING[mixing])
    assert steps_until_refused(model, lambda m, _: m(normal(B, D)).square().mean(), 1) == 0


@pytest.mark.parametrize("seed", range(6))
def test_mix_style_is_refused_whatever_the_seed(seed):
    random.seed(seed)
    torch.manual_seed(seed)
    model = Mixing(lambda _, h: mix_style(h))
    assert steps_until_refused(model, lambda m, _: m(normal(B, D)).square().mean(), 1) == 0


@pytest.mark.parametrize("seed", range(10))
def test_experts_of_limited_capacity_are_refused_whatever_the_seed(seed):
    torch.manual_seed(seed)

    class Switch(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts, self.head = nn.Linear(D, 3), nn.Linear(D, 3 * D), nn.Linear(D, 3)

        def forward(self, x):
            share, expert = self.router(x).softmax(-1).max(-1)
            turn = F.one_hot(expert, 3).cumsum(0).gather(1, expert[:, None])[:, 0]
            h = self.experts(x).unflatten(1, (3, D)).gather(1, expert[:, None, None].expand(-1, 1, D))[:, 0]
            return self.head(x + h * (share * (turn <= 1.25 * len(x) / 3))[:, None])

    assert steps_until_refused(Switch(), lambda m, _: m(2 * normal(B, D, seed=seed)).square().mean(), 1) == 0


def test_dynamic_quantisation_under_autocast_is_refused():
    model = Mixing(lambda _, h: quantised(h))
    with torch.autocast("cpu", torch.bfloat16):
        assert steps_until_refused(model, lambda m, _: m(normal(B, D)).float().square().mean(), 1) == 0


# --- losses of the model ------------------------------------------------------------------------------------------


class Loss(nn.Module):
    """Returns a loss of its scores and its other inputs."""

    def __init__(self, loss, inputs=D):
        super().__init__()
        self.layer, self.loss = nn.Linear(inputs, 3), loss

    def forward(self, x, *targets):
        return self.loss(self.layer(x), *targets)


def token_mean(scores_BTC, y_BT):
    return F.cross_entropy(scores_BTC.transpose(1, 2), y_BT, ignore_index=-100)


def test_a_token_mean_is_refused_when_the_first_documents_are_equally_long():
    y = torch.zeros(B, T, dtype=torch.long)
    y[9, 2:] = -100
    model = Loss(token_mean)
    assert steps_until_refused(model, lambda m, _: m(normal(B, T, D), y), 1) == 0


def test_weighted_cross_entropy_is_refused_when_the_first_labels_are_alike():
    weight = torch.tensor([1.0, 5.0, 1.0])
    y = torch.zeros(B, dtype=torch.long)
    y[-3:] = 1
    model = Loss(lambda scores, y: F.cross_entropy(scores, y, weight=weight))
    assert steps_until_refused(model, lambda m, _: m(normal(B, D), y), 1) == 0


def test_a_penalty_on_one_group_is_refused():
    group = torch.zeros(B, dtype=torch.long)
    group[[5, 9, 12]] = 1

    def loss(scores, group):
        return scores.square().mean() + scores[group == 1, 0].sum().square() / len(scores)

    assert steps_until_refused(Loss(loss), lambda m, _: m(normal(B, D), group), 1) == 0


def test_a_mean_over_valid_positions_is_refused():
    """Like BertForQuestionAnswering: positions beyond the length are ignored, and not counted."""

    def loss(scores, y):
        return F.cross_entropy(scores, y.clamp(0, 3), ignore_index=3)

    y = torch.zeros(B, dtype=torch.long)
    y[11] = 7
    assert steps_until_refused(Loss(loss), lambda m, _: m(normal(B, D), y), 1) == 0


def test_a_position_beyond_the_length_is_refused_when_it_comes_later():
    def loss(scores, y):
        return F.cross_entropy(scores, y.clamp(0, 3), ignore_index=3)

    def forward(m, step):
        y = torch.zeros(B, dtype=torch.long)
        y[11] = 7 if step == 5 else 1
        return m(normal(B, D), y)

    assert steps_until_refused(Loss(loss), forward, 8) == 5


# --- later -----------------------------------------------------------------------------------------------------------


def test_a_term_ramped_by_a_float_argument_is_refused_where_it_begins():
    model = Mixing(lambda _, h, weight: h - weight * h.mean(0))
    assert steps_until_refused(model, lambda m, s: m(normal(B, D), max(0.0, s - 5) / 10).square().mean(), 20) == 6


def test_a_term_ramped_by_a_counter_is_refused_at_the_next_power_of_two():
    model = Mixing(lambda m, h: h - max(0, m.calls - 5) / 100 * h.mean(0))
    assert steps_until_refused(model, lambda m, _: m(normal(B, D)).square().mean(), 20) == 8


def test_a_term_ramped_by_an_attribute_is_refused_where_it_begins():
    model = Mixing(lambda m, h: h - m.weight * h.mean(0))
    model.weight = 0.0

    def forward(m, step):
        m.weight = max(0.0, step - 5) / 10
        return m(normal(B, D)).square().mean()

    assert steps_until_refused(model, forward, 20) == 6


def test_a_string_among_the_arguments_is_verified_by_itself():
    model = Mixing(lambda _, h, how: centred(h) if how == "train" else h)
    assert steps_until_refused(model, lambda m, s: m(normal(B, D), "train" if s else "warm").square().mean(), 5) == 1


def test_it_is_found_in_the_micro_batches_of_engine_batches():
    model = Mixing(lambda m, h: h - max(0, m.calls - 20) / 100 * h.mean(0))
    engine = engine_on(model)
    with pytest.raises(VerificationError):  # noqa: PT012
        for logical_batch in engine.batches(TensorDataset(normal(B, D)), 4):
            for (x,) in logical_batch:
                model(x).square().mean().backward()
            engine.privatize()
            model.zero_grad()
    assert engine.step == 8


class Scaled(nn.Module):
    """Scales positions by the length of a long micro-batch: long and dynamic RoPE."""

    def __init__(self, *, keeps):
        super().__init__()
        self.embedding, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.keeps, self.longest = keeps, 0

    def forward(self, ids, mask):
        longest = max(ids.shape[1], self.longest)
        if self.keeps:
            self.longest = longest
        scale = 0.1 if longest > T else 1.0
        angle = scale * torch.arange(ids.shape[1])[:, None]
        return self.head((self.embedding(ids) * angle.cos() * mask[..., None]).cumsum(1))


def documents(lengths):
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for i, n in enumerate(lengths):
        ids[i, :n] = torch.arange(n) % (V - 1) + 1
    return ids, (ids > 0).long()


@pytest.mark.parametrize("keeps", [True, False])
def test_a_long_document_that_comes_later_and_scales_all_others_is_refused(keeps):
    def forward(m, step):
        ids, mask = documents([5, 6, 4, 6] if step < 3 else [5, 12, 4, 6])
        return (m(ids, mask).square().mean(-1) * mask).sum(1).mean()

    assert steps_until_refused(Scaled(keeps=keeps), forward, 5) == 3


def test_a_long_document_that_switches_phi3_to_longrope_is_refused():
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "rope_theta": 10.0}
    config = transformers.Phi3Config(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        original_max_position_embeddings=8,
        rope_parameters={**rope, "original_max_position_embeddings": 8},
        initializer_range=1.0,
        pad_token_id=0,
        use_cache=False,
    )
    model = transformers.Phi3ForCausalLM(config).train()

    def forward(m, step):
        ids, mask = documents([5, 6, 4, 6] if step < 2 else [5, 12, 4, 6])
        return (m(input_ids=ids, attention_mask=mask).logits.square().mean(-1) * mask).sum(1).mean()

    assert steps_until_refused(model, forward, 4) == 2


@pytest.mark.parametrize("late", [True, False])
def test_a_question_whose_answer_is_cut_off_is_refused(late):
    """BertForQuestionAnswering averages over the answers within the length."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=V, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.BertForQuestionAnswering(config).train()
    ids = torch.randint(1, V, (B, T), generator=torch.Generator().manual_seed(1))

    def forward(m, step):
        start = torch.arange(B) % T
        if step >= 5 * late:
            start[9] = T + 3
        return m(input_ids=ids, start_positions=start, end_positions=start).loss

    assert steps_until_refused(model, forward, 7) == 5 * late


# --- losses outside of the model ------------------------------------------------------------------------------------


OUTSIDE = {
    "token mean": (token_mean, (B, T, D), lambda y: y.index_fill(1, torch.arange(3, T), -100), (B, T)),
    "class weights": (
        lambda s, y: F.cross_entropy(s, y, weight=torch.tensor([1.0, 5.0, 1.0])),
        (B, D),
        lambda y: y + 1,
        (B,),
    ),
    "variance of the batch": (lambda s, y: s.square().mean() + 1e-3 * s.var(0).sum() + 0 * y.sum(), (B, D), None, (B,)),
}


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.filterwarnings("ignore:engine.verify")  # all rows of one loss have one target
@pytest.mark.parametrize("loss", OUTSIDE)
def test_a_loss_outside_that_is_handed_in_is_looked_at_on_all_rows(loss):
    function, shape, change, target_shape = OUTSIDE[loss]
    y = torch.zeros(target_shape, dtype=torch.long)
    if change is not None:
        y[7:9] = change(y[7:9])
    engine = engine_on(nn.Linear(D, 3))
    with pytest.raises(VerificationError):
        engine.verify(normal(*shape), loss_fn=function, targets=y)


# --- honest look-alikes ---------------------------------------------------------------------------------------------


HONEST = {
    "own maximum": lambda _, h: h / h.abs().amax(1, keepdim=True),
    "own quantisation": lambda _, h: h + (h.round() - h).detach(),
    "a rotation of channels": lambda _, h: h[:, torch.randperm(D)],
    "depth by a draw": lambda _, h: h if torch.rand(1) < 0.2 else h * 0.5,
    "noise": lambda _, h: h + torch.randn_like(h) * torch.rand(1),
    "weights by Beta": lambda _, h: h * torch.distributions.Beta(0.4, 0.4).sample((len(h), 1)),
    "a random integer a row": lambda _, h: h * (1 + torch.randint(0, 3, (len(h), 1))),
}


@pytest.mark.parametrize("honest", HONEST)
def test_an_honest_look_alike_passes(honest):
    model = Mixing(HONEST[honest])
    assert steps_until_refused(model, lambda m, _: m(normal(B, D)).square().mean(), 5) == 5


def test_an_honest_ramp_passes_and_is_verified_a_few_times(monkeypatch):
    seen = []
    verify = PrivacyEngine._before_forward
    model = Mixing(lambda m, h, weight: h * (1 + weight) * (1 + m.calls / 100))
    engine = engine_on(model)
    plain = engine._verifier.verify
    monkeypatch.setattr(engine._verifier, "verify", lambda *a, **k: (seen.append(1), plain(*a, **k)))
    assert verify
    for step in range(40):
        model(normal(B, D), step / 100).square().mean().backward()
        engine.privatize()
        model.zero_grad()
    assert len(seen) < 20


def test_documents_of_several_lengths_pass():
    class Honest(Scaled):
        def forward(self, ids, mask):
            angle = torch.arange(ids.shape[1])[:, None]
            return self.head((self.embedding(ids) * angle.cos() * mask[..., None]).cumsum(1))

    def forward(m, step):
        ids, mask = documents([5, 6 + step % 4, 4, 6])
        return (m(ids, mask).square().mean(-1) * mask).sum(1).mean()

    assert steps_until_refused(Honest(keeps=False), forward, 8) == 8


def test_raw_columns_of_large_scale_pass():
    """Income beside flags: the rounding of canceled terms exceeds the gradient."""
    x = torch.cat([1e6 * (1 + normal(B, 2).abs()), 1e4 * normal(B, 1, seed=2), normal(B, 3, seed=3).sign()], 1)
    y = torch.arange(B) % 3
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))
    assert steps_until_refused(model, lambda m, _: F.cross_entropy(m(x), y), 5) == 5
    linear = nn.Linear(6, 3)
    assert steps_until_refused(linear, lambda m, _: F.cross_entropy(m(x), y), 5) == 5


def test_a_refused_micro_batch_is_refused_again():
    model = Mixing(lambda m, h: h - float(getattr(m, "on", 0)) * h.mean(0))
    engine = engine_on(model)
    model(normal(B, D)).square().mean().backward()
    engine.privatize()
    model.zero_grad()
    model.on = 1
    for _ in range(3):
        with pytest.raises(DpshardError):
            model(normal(B, D))
