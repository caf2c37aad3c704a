"""Frozen parameters cost nothing, and bias-only training (BiTFiT; Zaken et al. 2021) keeps no activation.

Counted: the bytes that autograd saves for backward, parameters and buffers left out, under the engine and without it.

Failure modes: 6 test_what_is_trained_is_that_of_the_oracle; 9 test_a_frozen_parameter_gets_no_noise.
"""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpshard import PrivacyEngine
from dpshard.clipping.group_tape import GroupTape
from dpshard.clipping.tape import Tape
from dpshard.errors import VerificationError
from dpshard.records import PerSampleGrad
from tests.grids import all_pairs, each
from tests.oracle import assert_exact, noise_free_engine, randn

pytestmark = [
    pytest.mark.filterwarnings("ignore:This loop feeds its own batches"),
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
]

B, T, D, V = 4, 16, 24, 11


def linears():
    return nn.Sequential(nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D))


class GPT(nn.Module):
    """A block of common functions: embedding, positions, norms, attention, GELU, a tied head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(V, D), nn.Parameter(torch.randn(T, D))
        self.norms = nn.ModuleList([nn.LayerNorm(D), nn.LayerNorm(D)])
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, ids):
        x = self.embedding(ids) + self.positions
        q, k, v = self.qkv(self.norms[0](x)).view(len(ids), T, 3, 2, D // 2).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)) * self.scale
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return F.linear(x, self.embedding.weight)


def convolutions():
    return nn.Sequential(nn.Conv1d(D, D, 3, padding=1), nn.GroupNorm(2, D), nn.Tanh(), nn.Conv1d(D, 4, 1))


NETWORKS = {
    "linears": (linears, lambda: torch.randn(B, T, D)),
    "gpt": (GPT, lambda: torch.randint(0, V, (B, T))),
    "convolutions": (convolutions, lambda: torch.randn(B, D, T)),
}
TRAINED = {
    "all": lambda names: names,
    "biases": lambda names: [name for name in names if name.endswith("bias")],
    "last": lambda names: names[-1:],
    "one weight": lambda names: [name for name in names if name.endswith("weight")][1:2],
}


def build(network, trained):
    torch.manual_seed(0)
    make, data = NETWORKS[network]
    model, x = make(), data()
    names = TRAINED[trained]([name for name, _ in model.named_parameters()])
    for name, p in model.named_parameters():
        p.requires_grad_(name in names)
    return model, x


def engine_on(model, **options):
    return PrivacyEngine(
        model, **{"batch_size": B, "sample_size": 100, "steps": 5, "noise_multiplier": 0, "verify": False, **options}
    )


def saved_bytes(model, forward):
    """Return the bytes of the distinct storages that the graph of `forward` keeps for backward."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = forward()
    assert output.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(("network", "trained"), each(NETWORKS, TRAINED))
def test_the_graph_keeps_what_that_of_the_plain_model_keeps(network, trained):
    """Both nodes of a layer, autograd's and the engine's, keep the same input; frozen layers keep none."""
    model, x = build(network, trained)
    plain = saved_bytes(model, lambda: model(x))
    engine = engine_on(model)
    model(x)  # exclude one-time work
    private = saved_bytes(model, lambda: model(x))
    assert private <= plain
    engine.detach()
    assert saved_bytes(model, lambda: model(x)) == plain


def test_biases_of_linear_layers_keep_no_activation_at_all():
    model, x = build("linears", "biases")
    engine_on(model)
    model(x)
    assert saved_bytes(model, lambda: model(x)) == 0
    model, x = build("linears", "all")
    engine_on(model)
    model(x)
    assert saved_bytes(model, lambda: model(x)) >= 2 * B * T * D * 4  # the count includes what it must


@pytest.mark.parametrize(("network", "mode"), each(NETWORKS, ["auto", "bk", "ghost", "per-example"]))
def test_bias_records_hold_no_activation(network, mode, monkeypatch):
    """Only the output gradient reaches a slot, which keeps one row of the bias' size per sample."""
    model, x = build(network, "biases")
    for name, p in model.named_parameters():  # the affine norms keep their input for their own gradient
        p.requires_grad_(p.requires_grad and "norm" not in name and not (network == "convolutions" and name[0] == "1"))
    arrived, kept = [], []
    arrive, measure = Tape.arrive, GroupTape.measure

    def arriving(self, use, tensors):
        arrived.append([use.sources[0].label, len(tensors)])
        arrive(self, use, tensors)

    def measuring(self, name, *, keep, closing):
        measure(self, name, keep=keep, closing=closing)
        for entries in self.entries.values():
            kept.extend(record for _, record in entries)
        kept.extend(self.small.values())

    monkeypatch.setattr(Tape, "arrive", arriving)
    monkeypatch.setattr(GroupTape, "measure", measuring)
    engine_on(model, clipping_mode=mode)
    model(x).square().flatten(1).sum(1).mean().backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name, _ in arrived} == trained
    assert {count for _, count in arrived} == {1}
    if mode != "ghost":
        assert kept
    for record in kept:
        assert isinstance(record, PerSampleGrad)
        assert record.gradient.untyped_storage().nbytes() <= B * 4 * D * 4


@pytest.mark.parametrize(
    ("trained", "mode", "style"),
    all_pairs(TRAINED, ["auto", "ghost"], ["all-layer", "layer-wise", "param-wise"]),
)
def test_nothing_outlives_the_backward_pass(trained, mode, style):
    """After backward, the only live tensor with a row per position is the output."""
    model, x = build("gpt", trained)
    engine = engine_on(model, clipping_mode=mode, clipping_style=style)
    alive = []
    handles = [
        module.register_forward_hook(lambda _, __, output: alive.append(weakref.ref(output)))
        for module in model.modules()
        if not list(module.children())
    ]
    for step in range(2):
        model(x).square().flatten(1).sum(1).mean().backward()
        gc.collect()
        assert all(ref() is None for ref in alive)
        assert not engine._clipper.pending
        assert not engine._clipper.tokens
        engine.privatize()
        model.zero_grad()
        assert engine.step == step + 1
    assert len(alive) > 8
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(("trained", "network"), each(["biases", "last", "one weight"], ["linears", "convolutions"]))
def test_what_is_trained_is_that_of_the_oracle(network, trained):
    model, _ = build(network, trained)
    assert_exact(model, randn(B, *NETWORKS[network][1]().shape[1:]))


def test_a_frozen_parameter_gets_no_noise():
    model, x = build("gpt", "biases")
    engine = engine_on(model, noise_multiplier=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(x).square().flatten(1).sum(1).mean().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert engine.step == 1
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) is not p.requires_grad
        assert (p.grad is None) is not p.requires_grad


def test_frozen_parameters_are_in_no_group_and_no_count():
    model, x = build("linears", "biases")
    engine = engine_on(model, noise_multiplier=1.0, clipping_style="param-wise", max_grad_norm=3.0)
    assert engine.mechanism.clipping_groups == (("0.bias",), ("1.bias",), ("2.bias",))
    model(x).square().flatten(1).sum(1).mean().backward()
    engine.privatize()
    metrics = engine.metrics()
    assert metrics["clipped_sum_norm"] / metrics["gradient_snr"] == pytest.approx(3.0 * (3 * D) ** 0.5)


class Sines(nn.Module):
    def __init__(self, *, mixes: bool = False):
        super().__init__()
        self.mixes, self.layer = mixes, nn.Linear(D, D).requires_grad_(False)
        self.register_buffer("scale", torch.full((D,), 2.0))

    def forward(self, x):
        return self.layer(x - x.mean(0) if self.mixes else x).sin() * self.scale


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_frozen_part_may_be_scripted():
    model = nn.Sequential(nn.Linear(D, D), torch.jit.script(Sines().double()), nn.Linear(D, 2))
    assert_exact(model, randn(B, T, D), modes=["auto", "ghost"])


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_part_that_mixes_samples_is_refused():
    model = nn.Sequential(nn.Linear(D, D), torch.jit.script(Sines(mixes=True)), nn.Linear(D, 2))
    engine = noise_free_engine(model, batch_size=B, steps=1)
    with pytest.raises(VerificationError):
        model(torch.randn(B, T, D))
    engine.detach()
