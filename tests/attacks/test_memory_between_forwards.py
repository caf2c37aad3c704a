"""What a model keeps of samples between forwards is met by later samples: refused. Probes leave no trace.

Failure mode 12, and samples that meet across micro-batches and steps.
"""

import copy
import random
from collections import deque
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dpshard import DpshardError, PrivacyEngine
from dpshard.errors import UnsupportedParameterError
from tests import oracle
from tests.attacks.oracle import ALLOWED, influence, is_refused

pytestmark = [
    pytest.mark.filterwarnings("ignore:This loop feeds its own batches"),
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
]

B, T, D, V = 6, 5, 4, 11


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def engine_on(model, **options):
    return PrivacyEngine(
        model, batch_size=B, sample_size=100, steps=50, noise_multiplier=0, max_grad_norm=1.0, **options
    )


class Remembering(nn.Module):
    """Two linear maps; `use(module, h)` may keep anything in the attributes and buffers that `make(module)` made."""

    def __init__(self, make, use):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, 3)
        make(self)
        self.use = use

    def forward(self, x):
        return self.second(self.use(self, self.first(x)))


def hidden_state(m, h):
    before = getattr(m, "state", None)
    m.state = h.detach()
    return h if before is None or before.shape != h.shape else h + before


def queue(m, h):
    m.queue.append(h.detach().mean(0))
    return h - torch.stack(list(m.queue)).mean(0)


def counts(m, h):
    m.positive += (h > 0).sum()
    return h / (1 + m.positive)


def spectrum(m, h):
    m.spectrum = 0.9 * m.spectrum + 0.1 * torch.complex(h.detach(), h.detach()).mean(0)
    return h * m.spectrum.abs()


def running_maximum(m, h):
    m.largest = max(m.largest, float(h.detach().abs().max()))
    return h / m.largest


def in_an_object(m, h):
    m.memory.mean = 0.5 * m.memory.mean + float(h.detach().mean())
    return h - m.memory.mean


def in_an_array(m, h):
    m.array += h.detach().mean(0).numpy()
    return h - torch.from_numpy(m.array.copy())


_GLOBAL = {"mean": 0.0}


def in_a_global(m, h):
    before, _GLOBAL["mean"] = _GLOBAL["mean"], float(h.detach().mean())
    return h - before


def in_the_class(m, h):
    type(m).shared = [*type(m).shared, h.detach().mean(0)]
    return h - type(m).shared[0]


class Memory:
    """An object with an attribute."""

    mean = 0.0


class Sharing(Remembering):
    """Keeps earlier samples in its class."""

    shared: ClassVar[list] = []


def nothing(m):
    """Make nothing."""


REMEMBERING = {
    "a detached hidden state": (nothing, hidden_state),
    "a queue of features": (lambda m: setattr(m, "queue", deque(maxlen=3)), queue),
    "a list of features": (lambda m: setattr(m, "queue", []), queue),
    "an integer buffer": (lambda m: m.register_buffer("positive", torch.zeros((), dtype=torch.long)), counts),
    "a complex buffer": (lambda m: m.register_buffer("spectrum", torch.zeros(D, dtype=torch.complex64)), spectrum),
    "a running maximum": (lambda m: setattr(m, "largest", 0.1), running_maximum),
    "an object": (lambda m: setattr(m, "memory", Memory()), in_an_object),
    "an array": (lambda m: setattr(m, "array", np.zeros(D, np.float32)), in_an_array),
    "a global": (nothing, in_a_global),
}


@pytest.mark.parametrize("memory", REMEMBERING)
@pytest.mark.parametrize("rows", [1, B])
def test_a_model_that_remembers_samples_is_refused(memory, rows):
    model = Remembering(*REMEMBERING[memory])
    engine_on(model)
    with pytest.raises(UnsupportedParameterError, match=r"samples"):
        model(normal(rows, D))


def test_a_memory_in_the_class_is_refused():
    Sharing.shared = [torch.zeros(D)]
    model = Sharing(nothing, in_the_class)
    engine_on(model)
    with pytest.raises(UnsupportedParameterError, match="samples"):
        model(normal(B, D))
    assert len(Sharing.shared) == 1


@pytest.mark.parametrize("begin", [3, 6])
def test_a_memory_that_begins_later_is_refused_before_the_release(begin):
    """A queue fills only after a warm-up."""

    def use(m, h):
        m.calls += 1
        return queue(m, h) if m.calls > begin else h

    def make(m):
        m.queue, m.calls = [], 0

    model = Remembering(make, use)
    engine = engine_on(model)
    with pytest.raises(DpshardError):  # noqa: PT012
        for _ in range(10):
            model(normal(B, D)).square().mean().backward()
            engine.privatize()
            model.zero_grad()
    assert engine.step == begin


# --- what a backward pass keeps ---------------------------------------------------------------------------------------


class KeepsGradients(nn.Module):
    """Two linear maps; the gradient between them is handed to `keep(module, gradient)`, and divided by what is kept."""

    def __init__(self, keep, place="hook"):
        super().__init__()
        self.first, self.second = nn.Linear(3, D), nn.Linear(D, 2)
        self.register_buffer("size", torch.zeros(D))
        self.kept, self.log, self.keep, self.place = 0.0, [], keep, place
        if place == "module hook":
            self.second.register_full_backward_hook(lambda _m, inputs, _o: keep(self, inputs[0]))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if self.place == "function":
            h = Kept.apply(h, self)
        elif self.place == "hook" and h.requires_grad:
            h.register_hook(lambda gradient: self.keep(self, gradient))
        output = self.second(h / (1 + self.size + self.kept))
        if self.place == "forward" and torch.is_grad_enabled():
            self.keep(self, h)
        return output


class Kept(torch.autograd.Function):
    """Hands its gradient to a module."""

    @staticmethod
    def forward(ctx, h, module):
        ctx.module = module
        return h.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.module.keep(ctx.module, gradient)
        return gradient, None


def in_a_buffer(module, gradient):
    module.size.mul_(0.5).add_(20 * gradient.abs().sum(0))


def in_an_attribute(module, gradient):
    module.kept = 20 * gradient.detach().abs().sum(0)


def scales_the_next(module, gradient):
    """As delayed scaling of gradients of 8 bits does; the next forward does not read it."""
    before, module.log = module.log, [float(gradient.abs().max())]
    return gradient / before[0] if before else None


def two_micro_batches(model, engine, optimizer, dataset):
    for logical_batch in engine.batches(dataset, 4):
        for x, y in logical_batch:
            (5 * F.cross_entropy(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()


def labelled(n=8):
    x = normal(n, 3)
    x[0] *= 20
    return TensorDataset(x, torch.arange(n) % 2)


@pytest.mark.parametrize(
    ("keep", "place"),
    [
        (in_a_buffer, "hook"),
        (in_a_buffer, "module hook"),
        (in_a_buffer, "function"),
        (in_an_attribute, "hook"),
        (in_an_attribute, "forward"),
        (scales_the_next, "hook"),
    ],
)
def test_a_backward_that_remembers_samples_is_refused(keep, place):
    assert "keeps a function of its samples" in (
        is_refused(lambda: KeepsGradients(keep, place), two_micro_batches, labelled()) or ""
    )


@pytest.mark.parametrize(("keep", "place"), [(in_an_attribute, "hook"), (scales_the_next, "hook")])
def test_what_one_sample_counts_if_a_backward_remembers_it(keep, place):
    found = influence(lambda: KeepsGradients(keep, place), two_micro_batches, labelled(), verify=False)
    assert found > 1.1


def test_a_log_of_gradients_that_nobody_reads_is_exact():
    def logs(module, gradient):
        module.log.append(float(gradient.norm()))

    assert influence(lambda: KeepsGradients(logs), two_micro_batches, labelled(), left_out=[0]) <= ALLOWED


# --- what writes into parameters --------------------------------------------------------------------------------------


class ActNorm(nn.Module):
    """Initialises its scale and shift from the first batch."""

    def __init__(self, how):
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.ones(D))
        self.how = how
        self.initialised = False

    def forward(self, x):
        if not self.initialised:
            self.initialised = True
            if self.how == "data":
                self.shift.data.copy_(-x.mean(0))
                self.scale.data.div_(x.std(0) + 1)
            else:
                with torch.no_grad():
                    self.shift.sub_(x.mean(0))
                    self.scale.div_(x.std(0) + 1)
        return (x + self.shift) * self.scale


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("how", ["data", "no_grad"])
def test_an_initialisation_from_data_is_refused_before_it_is_written(how, verify):
    model = nn.Sequential(nn.Linear(D, D), ActNorm(how))
    before = copy.deepcopy(model.state_dict())
    engine_on(model, verify=verify)
    with pytest.raises(UnsupportedParameterError, match=r"1\.(shift|scale): forward writes values that depend"):
        model(normal(B, D))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not model[1].initialised


def test_a_parameter_that_is_written_to_later_is_refused():
    class Late(ActNorm):
        calls = 0

        def forward(self, x):
            self.calls += 1
            self.initialised = self.calls != 4
            return super().forward(x)

    model = nn.Sequential(nn.Linear(D, D), Late("no_grad"))
    engine = engine_on(model, verify=False)
    with pytest.raises(UnsupportedParameterError, match="forward writes values that depend"):  # noqa: PT012
        for _ in range(5):
            model(normal(B, D)).square().mean().backward()
            engine.privatize()
            model.zero_grad()
    assert engine.step == 3


def test_an_initialisation_before_the_engine_passes():
    model = nn.Sequential(nn.Linear(D, D), ActNorm("data")).double()
    x = normal(B, D).double()
    model(x)
    single = oracle.per_sample_gradients(model, [x], lambda output: output.square().mean())
    engine = engine_on(model, clipping_fn="abadi")
    model(x).square().mean().backward()
    engine.privatize()
    expected = oracle.clipped_mean(single, max_grad_norm=1.0, batch_size=B)
    assert oracle.relative_error(oracle.gradients_of(model), expected) < 1e-10


@pytest.mark.parametrize("bag", [True, False])
def test_a_frozen_embedding_with_a_maximal_norm_is_refused(bag):
    kind = nn.EmbeddingBag if bag else nn.Embedding
    model = nn.Sequential(kind(V, D, max_norm=1).requires_grad_(False), nn.Linear(D, 3))
    with torch.no_grad():
        model[0].weight.mul_(10)
    before = model[0].weight.clone()
    engine_on(model)
    with pytest.raises(UnsupportedParameterError, match=r"0\.weight: forward writes values that depend.*max_norm"):
        model(torch.arange(B * T).view(B, T) % V)
    assert torch.equal(model[0].weight, before)


# --- probes leave a model as they found it ----------------------------------------------------------------------------


class Stateful(nn.Module):
    """Counts its calls in every way, and draws from its own generators."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.calls, self.log, self.table = 0, [], {}
        self.memory, self.array = Memory(), np.zeros(2)
        self.dice, self.die = random.Random(3), np.random.default_rng(3)
        self.generator = torch.Generator().manual_seed(3)
        self.last = None

    def forward(self, x):
        self.calls += 1
        self.steps += 1
        self.phase = self.phase + 1j
        self.log.append(self.calls)
        self.table.setdefault("shapes", {})[self.calls] = tuple(x.shape[1:])
        self.memory.mean = self.memory.mean + 1.0
        self.array += 1
        drawn = self.dice.random() + self.die.random() + torch.rand((), generator=self.generator) * 0
        self.last = self.layer(x) * (1 + self.calls) * drawn
        return self.last


def test_a_forward_with_an_engine_is_the_forward_without_one():
    plain = Stateful()
    model = copy.deepcopy(plain)
    engine_on(model)
    for _ in range(3):
        assert torch.equal(plain(normal(B, D)), model(normal(B, D)))
    assert (model.calls, model.log, model.table) == (plain.calls, plain.log, plain.table)
    assert model.memory.mean == plain.memory.mean
    assert np.array_equal(model.array, plain.array)
    assert torch.equal(model.phase, plain.phase)
    assert model.steps == plain.steps
    assert model.dice.random() == plain.dice.random()
    assert model.die.random() == plain.die.random()
    assert torch.equal(model.generator.get_state(), plain.generator.get_state())


class Hooked(nn.Module):
    """Registers a hook on its layer in its first forward, and notes it, as transformers' models do."""

    def __init__(self):
        super().__init__()
        self.layer, self.installed = nn.Linear(D, D), False

    def forward(self, x):
        if not self.installed:
            self.installed = True
            self.layer.register_forward_hook(lambda _, args, output: 2 * output)
        return self.layer(x)


def test_a_hook_that_the_first_forward_installs_is_there_once():
    plain = Hooked()
    model = copy.deepcopy(plain)
    engine_on(model)
    for _ in range(2):
        assert torch.equal(plain(normal(B, D)), model(normal(B, D)))
    assert len(model.layer._forward_hooks) == len(plain.layer._forward_hooks) == 1


def llama(**rope):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
        rope_parameters={"rope_theta": 10.0, **rope},
        use_cache=False,
        initializer_range=1.0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def test_the_first_step_of_a_llama_with_dynamic_rope_is_that_of_plain_autograd():
    """All documents have one length, beyond the table, so the scale is a constant."""
    model = llama(rope_type="dynamic", factor=4.0)
    plain = copy.deepcopy(model).train()
    ids = torch.randint(1, V, (1, 12), generator=torch.Generator().manual_seed(2))
    F.cross_entropy(plain(ids).logits[:, :-1].mT, ids[:, 1:]).backward()
    norm = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
    engine = PrivacyEngine(
        model.train(), batch_size=1, sample_size=10, steps=9, noise_multiplier=0, clipping_fn="abadi"
    )
    F.cross_entropy(model(ids).logits[:, :-1].mT, ids[:, 1:]).backward()
    engine.privatize()
    factor = min(1.0, 1.0 / float(norm))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, factor * q.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 4.0}])
def test_a_long_document_in_a_llama_whose_rope_follows_the_length_is_refused(rope):
    model = llama(**rope).train()
    engine = PrivacyEngine(model, batch_size=3, sample_size=10, steps=9, noise_multiplier=0)
    with pytest.raises(DpshardError, match="longest row"):  # noqa: PT012
        for step in range(4):
            lengths = [5, 6, 4] if step < 2 else [5, 16, 4]
            ids = torch.zeros(3, max(lengths), dtype=torch.long)
            for i, n in enumerate(lengths):
                ids[i, :n] = torch.arange(n) % (V - 1) + 1
            mask = (ids > 0).long()
            (model(input_ids=ids, attention_mask=mask).logits.square().mean(-1) * mask).sum(1).mean().backward()
            engine.privatize()
            model.zero_grad()
    assert engine.step == 2


# --- honest look-alikes -----------------------------------------------------------------------------------------------


def stash(m, h):
    m.features = h.detach()
    m.penalty = h.square().mean(1)
    return h


def counter(m, h):
    m.calls += 1
    m.ticks += 1
    return h * (1 + m.calls / 100)


def cache_by_length(m, h):
    if h.shape[-1] not in m.tables:
        m.tables[h.shape[-1]] = torch.arange(h.shape[-1]) / 10
    return h + m.tables[h.shape[-1]]


def own_generator(m, h):
    return h + torch.randn((), generator=m.generator)


def make_counter(m):
    m.calls = 0
    m.register_buffer("ticks", torch.zeros((), dtype=torch.long))


HONEST = {
    "a stash for the loss": (nothing, stash),
    "a counter": (make_counter, counter),
    "a cache by length": (lambda m: setattr(m, "tables", {}), cache_by_length),
    "a generator": (lambda m: setattr(m, "generator", torch.Generator().manual_seed(1)), own_generator),
}


@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("honest", HONEST)
def test_state_that_no_sample_decides_passes(honest, rows):
    model = Remembering(*HONEST[honest])
    engine = engine_on(model)
    for seed in range(10):
        model(normal(rows, D, seed=seed)).square().mean().backward()
        engine.privatize()
        model.zero_grad()
    assert engine.step == 10
