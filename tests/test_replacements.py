"""What takes the place of layers that have no per-sample gradient."""

import pytest
import torch
from torch import nn

import dpshard
from dpshard.errors import UnsupportedParameterError
from tests.oracle import assert_exact, private_step, ramp_loss, randn


def network():
    return nn.Sequential(
        nn.Conv2d(3, 48, 3),
        nn.BatchNorm2d(48, eps=1e-3),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(48, 6, 3), nn.InstanceNorm2d(6, affine=True, track_running_stats=True), nn.Flatten()),
        nn.Linear(6 * 16, 10),
        nn.BatchNorm1d(10),
    )


def test_what_is_done_is_told_and_makes_the_model_exact():
    torch.manual_seed(0)
    model, x = network(), randn(3, 3, 8, 8)
    with pytest.raises(UnsupportedParameterError, match=r"1 \(BatchNorm2d\).*dpshard\.replace_unsupported"):
        private_step(model.double(), (x,), ramp_loss)
    assert dpshard.replace_unsupported(model) == {
        "1": "BatchNorm2d -> GroupNorm(24, 48)",
        "3.1": "InstanceNorm2d -> InstanceNorm2d(track_running_stats=False)",
        "5": "BatchNorm1d -> GroupNorm(1, 10)",
    }
    assert dpshard.replace_unsupported(model) == {}
    assert_exact(model, x, modes=["auto"])


def test_parameters_and_settings_stay():
    model = network().eval()
    before = dict(model.named_parameters())
    model[1].weight.requires_grad_(False)
    dpshard.replace_unsupported(model)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is before[name] for name in before)
    assert (model[1].eps, model[1].training, model[1].affine) == (1e-3, False, True)
    assert not any("running" in name or "tracked" in name for name in model.state_dict())


def test_without_parameters():
    model = nn.Sequential(nn.BatchNorm3d(8, affine=False))
    dpshard.replace_unsupported(model)
    assert list(model.parameters()) == []
    assert not model[0].affine


@pytest.mark.parametrize("channels", [1, 2, 3, 7, 16, 64, 100, 2048])
def test_groups_divide_the_channels_and_hold_two_at_least(channels):
    model = nn.Sequential(nn.BatchNorm2d(channels))
    dpshard.replace_unsupported(model)
    groups = model[0].num_groups
    assert channels % groups == 0
    assert groups <= 32
    assert channels // groups >= min(2, channels)


def test_a_layer_in_two_places_stays_one():
    shared = nn.BatchNorm2d(4)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    assert set(dpshard.replace_unsupported(model)) == {"a", "b.0"}
    assert model["a"] is model["b"][0]


def test_instance_norm_computes_the_same_in_training():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.InstanceNorm1d(4, affine=True, track_running_stats=True)), torch.randn(3, 4, 5)
    expected = model(x)
    dpshard.replace_unsupported(model)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_become_dense(kind):
    model, ids = nn.Sequential(kind(7, 3, sparse=True)), torch.tensor([[1, 2], [2, 2], [0, 5]])
    name = kind.__name__
    assert dpshard.replace_unsupported(model) == {"0": f"{name} -> {name}(sparse=False)"}
    assert_exact(model, ids, modes=["auto"])


def test_what_does_more_than_normalise_is_refused():
    class WithActivation(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    with pytest.raises(UnsupportedParameterError, match=r"0 \(WithActivation\).*GroupNorm"):
        dpshard.replace_unsupported(nn.Sequential(WithActivation(4)))
    with pytest.raises(UnsupportedParameterError, match=r"the model \(BatchNorm2d\)"):
        dpshard.replace_unsupported(nn.BatchNorm2d(4))


def test_a_replacement_after_the_engine_was_made_trains():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    engine = dpshard.PrivacyEngine(model, batch_size=4, sample_size=8, steps=2, noise_multiplier=1.0, max_grad_norm=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(randn(8, 3))
    for logical_batch in engine.batches(data, micro_batch_size=4):
        for (x,) in logical_batch:
            if isinstance(model[1], nn.BatchNorm1d):
                with pytest.raises(UnsupportedParameterError, match="Before making the engine"):
                    model(x)
                dpshard.replace_unsupported(model)
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.step == 2
