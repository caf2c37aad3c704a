"""Plans of calls: from the second forward on, uses of parameters are repeated without their rules."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpshard.interception.layouts import Layouts
from dpshard.interception.plans import PlannedUse
from dpshard.rules import RULES
from tests.oracle import (
    TOLERANCE,
    clipped_mean,
    gradients_of,
    noise_free_engine,
    norm,
    per_sample_gradients,
    private_step,
    ramp_loss,
    randn,
    relative_error,
)

B, T, D = 4, 3, 6

pytestmark = pytest.mark.filterwarnings("ignore:This loop feeds its own batches")


class Layers(nn.Module):
    """Planned functions, also called in ways that modules of torch do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.rms, self.groups = (
            nn.Linear(D, D),
            nn.LayerNorm(D),
            nn.RMSNorm(D),
            nn.GroupNorm(2, D),
        )
        self.frozen = nn.BatchNorm1d(D).eval()
        self.matrix, self.bias = nn.Parameter(randn(D, D)), nn.Parameter(randn(D))
        self.eps, self.twice, self.length, self.way = 1e-5, False, T, plainly

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.norm.weight, self.norm.bias
        x = self.rms(self.norm(self.into(x.narrow(1, 0, self.length))))
        x = self.frozen(self.groups(x.mT)).mT
        x = F.layer_norm(x, [D], weight, bias, self.eps)  # a list has no hash
        x = F.relu(F.linear(x, self.matrix, self.bias), inplace=True)
        x = F.linear(input=x, weight=self.matrix)
        x = torch.addmm(self.bias, x.reshape(-1, D), self.matrix).view(x.shape)
        x = self.into(x.flatten(0, 1)).view(x.shape) if self.twice else x @ self.matrix
        x = self.way(lambda x: F.linear(x, self.matrix, self.bias), x)
        return torch.layer_norm(x, (D,), weight, bias, self.eps)


def plainly(layer, x):
    return layer(x) + layer(x.flatten(0, 1)).view(x.shape)


def in_vmap(layer, x):
    return torch.vmap(layer)(x)  # sees rows of rank 2


def partly_without_gradients(layer, x):
    with torch.no_grad():
        constant = layer(x)
    return layer(x) * constant


def with_saved_copies(layer, x):
    with torch.autograd.graph.save_on_cpu():
        return layer(x)


def of_a_subclass(layer, x):
    class Labelled(Tensor):
        pass

    return layer(x.as_subclass(Labelled)).as_subclass(Tensor)


def then_written(layer, x):
    y = layer(x).mul_(2)
    y[:, 0].add_(1)
    return y


def with_a_hook(layer, x):
    y = layer(x)
    y.register_hook(lambda g: g * 2)
    return y


def freeze(model: Layers) -> None:
    model.matrix.requires_grad_(False)
    model.norm.bias.requires_grad_(False)


WAYS = (in_vmap, partly_without_gradients, with_saved_copies, of_a_subclass, then_written, with_a_hook)
CHANGES = {
    "nothing": lambda model: None,
    "a constant": lambda model: setattr(model, "eps", 0.5),
    "the rank": lambda model: setattr(model, "twice", True),
    "the length": lambda model: setattr(model, "length", T - 1),
    "what is trained": freeze,
    "the values": lambda model: nn.init.normal_(model.matrix.data),
    "a buffer": lambda model: setattr(model.frozen, "running_var", torch.full((D,), 4.0, dtype=torch.float64)),
    "a parameter of another module": lambda model: setattr(model.rms, "eps", 0.25),
    **{way.__name__: lambda model, way=way: setattr(model, "way", way) for way in WAYS},
}


@pytest.mark.parametrize("style", ["all-layer", "layer-wise"])
@pytest.mark.parametrize("change", CHANGES)
def test_plans_are_those_of_the_calls_now(change, style):
    torch.manual_seed(0)
    model = Layers().double()
    engine = noise_free_engine(model, batch_size=B, steps=5, max_grad_norm=1.0, verify=False, clipping_style=style)
    groups = [list(names) for names in engine.mechanism.clipping_groups]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(5):
        if step == 3:
            CHANGES[change](model)
        x = randn(B, T, D)
        per_sample = per_sample_gradients(copy.deepcopy(model), (x,))
        assert max(map(norm, per_sample)) > 1.0
        trained = [[name for name in names if name in per_sample[0]] for names in groups]
        ramp_loss(model(x)).backward()
        optimizer.step()
        expected = clipped_mean(per_sample, max_grad_norm=1.0, batch_size=B, groups=trained)
        assert relative_error(gradients_of(model), expected) <= TOLERANCE, step
        optimizer.zero_grad()
    engine.detach()


def test_a_planned_use_runs_without_its_rule(monkeypatch):
    """The first forward makes the plans; another number of samples, and another rank of inputs, need others."""
    counts = []
    for function in (torch._C._nn.linear, F.layer_norm):
        monkeypatch.setitem(
            RULES, function, lambda *args, _rule=RULES[function], **kw: (counts.append(1), _rule(*args, **kw))[1]
        )
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D))
    engine = noise_free_engine(model, batch_size=B, steps=1, verify=False)
    found = []
    for shape in ((B, T, D), (B, T, D), (2, T, D), (2, 2, D), (B, 2, D), (B, D), (B, D), (B, T, D)):
        counts.clear()
        model(torch.randn(shape))
        found.append(len(counts))
    engine.detach()
    assert found == [3, 0, 3, 0, 0, 3, 0, 0]


def test_a_counter_among_the_inputs_does_not_probe_for_ever(monkeypatch):
    """Numbers have probes of their own, as they may cut samples into pieces, until there are too many."""
    probed = []
    probe = Layouts.probe
    monkeypatch.setattr(Layouts, "probe", lambda self, run, into: probed.append(run) or probe(self, run, into))
    model = nn.Sequential(nn.Linear(D, D))
    model.forward = lambda x, step: model[0](x) * (step > 0)
    engine = noise_free_engine(model, batch_size=B, steps=1, verify=False)
    for step in range(512, 600):
        model(torch.randn(B, D), step)
    engine.detach()
    assert len(probed) == 64 + 1


def count_plans():
    gc.collect()
    return sum(isinstance(x, PlannedUse) for x in gc.get_objects())


def test_views_of_parameters_leave_no_plans():
    """Each forward makes views of its own."""
    matrix = nn.Parameter(torch.randn(D, D))
    model = nn.Sequential(nn.Linear(D, D))
    model.matrix = matrix
    model.forward = lambda x: model[0](x) @ matrix.t() + F.linear(x, 1 + matrix) + x @ matrix
    engine = noise_free_engine(model, batch_size=B, steps=1, verify=False)
    kept = [count_plans()]
    for _ in range(3):
        model(torch.randn(B, D))
        kept.append(count_plans() - kept[0])
    engine.detach()
    assert kept[1:] == [2, 2, 2]


def trained(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(steps):
        ramp_loss(model(randn(B, T, D).to(model[0].weight.dtype))).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_planned_product_is_one_node_with_its_tap_where_nothing_waits_for_its_parts():
    model = nn.Sequential(nn.Linear(D, D))
    engine = noise_free_engine(model, batch_size=B, steps=2, verify=False)
    trained(model, 1)
    x = torch.randn(B, T, D)
    assert "Fused" in model(x).grad_fn.name()
    with torch.autograd.graph.save_on_cpu():
        assert "Fused" not in model(x).grad_fn.name()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "Fused" not in model(x).grad_fn.name()
    engine.detach()


def test_a_parameter_may_get_other_data_before_backward():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)).double(), randn(B, T, D)
    expected = clipped_mean(per_sample_gradients(model, (x,)), max_grad_norm=1.0, batch_size=B)
    engine = noise_free_engine(model, batch_size=B, steps=4, max_grad_norm=1.0, verify=False)
    trained(model, 2)
    loss = ramp_loss(model(x))
    model[1].weight.data = 2 * model[1].weight.data
    loss.backward()
    found = {name: p.grad / B for name, p in model.named_parameters()}
    engine.detach()
    assert relative_error(found, expected) <= TOLERANCE


def test_a_bias_from_elsewhere_keeps_its_gradient():
    bias = torch.zeros(D, requires_grad=True)
    model = nn.Sequential(nn.Linear(D, D, bias=False))
    model.forward = lambda x: F.linear(x, model[0].weight, bias)
    engine = noise_free_engine(model, batch_size=B, steps=4, verify=False)
    trained(model, 2)
    bias.grad = None
    model(torch.randn(B, T, D)).sum().backward()
    engine.detach()
    assert bias.grad.tolist() == [B * T] * D


def test_one_step_under_autocast():
    def step(before):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D)), torch.randn(B, T, D)
        engine = noise_free_engine(model, batch_size=B, steps=4, max_grad_norm=1.0, verify=False)
        trained(model, before)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ramp_loss(model(x))
        loss.backward()
        found = gradients_of(model)
        engine.detach()
        return found

    first, later = step(0), step(2)
    assert all(torch.equal(first[name], later[name]) for name in first)


def test_an_input_written_after_its_use_is_refused_as_by_torch():
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))

    def forward(x):
        h = model[0](x)
        y = model[1](h)
        h.mul_(2)
        return y

    model.forward = forward
    engine = noise_free_engine(model, batch_size=B, steps=1, verify=False)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(torch.randn(B, D)).sum().backward()
    engine.detach()


def test_a_second_derivative_of_a_planned_use_is_refused():
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D))
    engine = noise_free_engine(model, batch_size=B, steps=1, verify=False)
    x = torch.randn(B, D, requires_grad=True)
    model(x)
    with pytest.raises(Exception, match="create_graph"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    engine.detach()


def test_a_gradient_of_the_input_alone_brings_no_records():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D)).double()
    x = randn(B, D).requires_grad_()
    update = clipped_mean(per_sample_gradients(model, (x.detach(),)), max_grad_norm=1.0, batch_size=B)
    (expected,) = torch.autograd.grad(ramp_loss(model(x)), x)
    engine = noise_free_engine(model, batch_size=B, steps=2, max_grad_norm=1.0, verify=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        loss = ramp_loss(model(x))
        (found,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert torch.allclose(found, expected, rtol=TOLERANCE)
        assert all(p.grad is None for p in model.parameters())
        loss.backward()
        optimizer.step()
        assert relative_error(gradients_of(model), update) <= TOLERANCE
        optimizer.zero_grad()
    engine.detach()


def test_ranks_with_samples_in_other_dimensions():
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(D, D)).double(), (randn(B, T, D),)
    layer = model[0]
    model.forward = lambda x: layer(x.transpose(0, 1)).transpose(0, 1) * layer(x.mean(1)).unsqueeze(1)
    expected = clipped_mean(per_sample_gradients(model, data), max_grad_norm=1.0, batch_size=B)
    assert relative_error(private_step(model, data, steps=2, verify=False), expected) <= TOLERANCE
