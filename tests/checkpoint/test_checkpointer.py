"""Checkpointer in one process: what is saved, what is refused, and what a damaged disk does.

Failure modes: 24 test_a_training_goes_on_bit_for_bit, test_a_damaged_checkpoint_is_passed_over.
"""

import errno
import json
import os
import pickle
import stat
import warnings
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpshard import Checkpointer, PrivacyEngine, QuantileTracking
from dpshard.checkpoint import folders
from dpshard.checkpoint.journal import Journal
from dpshard.checkpoint.storage import pack
from dpshard.errors import CheckpointError, ConfigurationError, LogicalBatchError
from dpshard.recipes import AdamBC
from tests.checkpoint.test_resume import Run, X, Y
from tests.grids import all_pairs

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "plain": lambda p: torch.optim.SGD(p, 0.1),
    "adam-bc": lambda p: AdamBC(p, lr=0.1, noise_std=lambda: 0.1, floor=1e-4),
}


class Training(Run):
    """A training with a scheduler and a checkpointer."""

    def __init__(self, folder, optimizer="adam", keep=2, **options):
        super().__init__(**options)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5])
        self.checkpoints = Checkpointer(folder, self.engine, self.optimizer, keep=keep, scheduler=self.scheduler)

    def train(self, steps, batches=None):
        batches = batches or self.engine.batches(TensorDataset(X, Y), 3)
        for _ in range(steps):
            super().train(1, batches)
            self.scheduler.step()

    @property
    def state(self):
        return self.save()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.mark.parametrize(("after", "optimizer", "wait"), all_pairs([0, 3], list(OPTIMIZERS), [True, False]))
def test_a_training_goes_on_bit_for_bit(folder, optimizer, after, wait):
    whole = Training(folder, optimizer)
    assert not whole.checkpoints.load()
    whole.train(after)
    place = whole.checkpoints.save(wait=wait)
    whole.train(4)  # while it is written
    whole.checkpoints.wait()
    assert place == folder / f"step-{after:08d}"
    resumed = Training(folder, optimizer)
    assert resumed.checkpoints.load()
    assert resumed.engine.step == after
    resumed.train(4)
    assert torch.equal(resumed.weights, whole.weights)
    assert resumed.scheduler.state_dict() == whole.scheduler.state_dict()
    assert resumed.engine.epsilon() == whole.engine.epsilon()


def test_adaptive_thresholds_are_saved(folder):
    options = {"clipping_style": "layer-wise", "adaptive_clipping": QuantileTracking()}
    whole = Training(folder, **options)
    whole.train(3)
    whole.checkpoints.save()
    whole.train(4)
    resumed = Training(folder, **options)
    assert resumed.checkpoints.load()
    assert resumed.engine.thresholds != whole.engine.thresholds
    resumed.train(4)
    assert torch.equal(resumed.weights, whole.weights)
    assert resumed.engine.thresholds == whole.engine.thresholds


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_saving_changes_nothing(folder, optimizer):
    """torch takes a step to find the optimizer's state; Adam would count it."""
    one, other = Training(folder, optimizer), Training(folder / "other", optimizer)
    other.engine._secret = one.engine._secret
    one.checkpoints.save()
    for training in (one, other):
        training.train(3)
    assert torch.equal(one.weights, other.weights)


def test_a_used_training_goes_back_to_a_state_before_the_first_step(folder):
    training = Training(folder)
    training.checkpoints.save()
    training.train(2)
    weights = training.weights
    assert training.checkpoints.load()
    assert not training.optimizer.state
    training.train(2)
    assert torch.equal(training.weights, weights)


def test_compiled_and_tied_models_and_buffers_are_saved(folder):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = nn.Linear(4, 4)
            self.b.weight = self.a.weight
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x):
            return self.b(torch.tanh(self.a(x))) * self.scale

    def make(scale):
        model = Tied()
        model.scale.fill_(scale)
        engine = PrivacyEngine(
            torch.compile(model, backend="eager"), batch_size=8, sample_size=40, steps=3, noise_multiplier=1.0
        )
        return model, Checkpointer(folder, engine, torch.optim.SGD(model.parameters(), 0.1))

    saved, checkpoints = make(3.0)
    checkpoints.save()
    model, checkpoints = make(1.0)
    assert checkpoints.load()
    assert model.scale == 3
    assert model.a.weight is model.b.weight
    for own, other in zip(model.parameters(), saved.parameters(), strict=True):
        assert torch.equal(own, other)


def test_the_newest_are_kept_for_their_owner_alone(folder):
    before = os.umask(0)
    try:
        training = Training(folder, keep=3)
        for _ in range(5):
            training.train(1)
            training.checkpoints.save()
    finally:
        os.umask(before)
    journal = folder / "releases.journal"
    assert sorted(folder.iterdir()) == [journal, *(folder / f"step-{step:08d}" for step in (3, 4, 5))]
    assert stat.S_IMODE(journal.stat().st_mode) == 0o600
    for path in folder.glob("step-*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a flipped bit in the tensors": lambda path: flip(path / "__0_0.distcp"),
    "a flipped bit in the table of contents": lambda path: flip(path / ".metadata"),
    "a flipped bit in the manifest": lambda path: flip(path / "manifest.json"),
    "half of the tensors": lambda path: os.truncate(path / "__0_0.distcp", 100),
    "no tensors": lambda path: (path / "__0_0.distcp").unlink(),
    "no table of contents": lambda path: (path / ".metadata").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "an empty manifest": lambda path: (path / "manifest.json").write_text(""),
    "somebody else's manifest": lambda path: (path / "manifest.json").write_text('{"name": "app"}'),
    "a manifest that is a list": lambda path: (path / "manifest.json").write_text("[1]"),
    "another step's": lambda path: (path.rename(path.parent / "x"), (path.parent / "step-00000001").rename(path)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(folder, damage):
    training = Training(folder, keep=3)
    for _ in range(3):
        training.checkpoints.save()
        training.train(1)
    weights, last = training.weights, folder / "step-00000002"
    DAMAGE[damage](last)
    resumed = Training(folder)
    left = 0 if damage == "another step's" else 1
    with pytest.warns(UserWarning, match=rf"step-00000002.*damaged.*Resuming from step-0000000{left}"):
        assert resumed.checkpoints.load()
    assert resumed.engine.step == left
    resumed.train(2 - left)
    resumed.checkpoints.save()  # replaces the damaged one
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Training(folder).checkpoints.load()
    resumed.train(1)
    assert torch.equal(resumed.weights, weights)


def test_saves_before_a_damaged_checkpoint_stay(folder):
    training = Training(folder, keep=1)
    training.train(3)
    training.checkpoints.save()
    (folder / "step-00000003").rename(folder / "step-00000009")
    training.checkpoints.save()
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000003", "step-00000009"]


def test_no_sound_checkpoint_is_an_error(folder):
    training = Training(folder)
    training.checkpoints.save()
    flip(folder / "step-00000000" / ".metadata")
    before = training.state
    with pytest.raises(CheckpointError, match=r"damaged.*no other.*new run"):
        training.checkpoints.load()
    assert str(training.state) == str(before)


def test_releases_of_earlier_starts_without_a_checkpoint_are_told(folder):
    """They were seen, but the new run has another secret and a ledger of its own."""
    crashed = Training(folder)
    assert not crashed.checkpoints.load()
    crashed.train(2)
    again = Training(folder)
    with pytest.warns(UserWarning, match=r"releases\.journal has 2 releases of earlier starts.*does not count them"):
        assert not again.checkpoints.load()
    again.checkpoints.save()
    assert Training(folder).checkpoints.load()  # without a warning


def test_too_few_released_steps_change_nothing(folder):
    """The parameters of steps that the ledger does not know would be those of uncounted releases."""
    training = Training(folder)
    training.train(3)
    training.checkpoints.save()
    resumed = Training(folder)
    before, weights = str(resumed.state), resumed.weights.clone()
    with pytest.raises(ConfigurationError, match=r"released=2.*at least the 3 of the state"):
        resumed.checkpoints.load(released=2)
    assert str(resumed.state) == before
    assert torch.equal(resumed.weights, weights)


def test_a_release_that_does_not_reach_the_disk_moves_no_parameter(folder):
    """Also not if the script catches the error, and steps again."""
    training = Training(folder)
    weights = training.weights.clone()
    failed = Future()
    failed.set_exception(OSError(errno.EIO, "I/O error"))
    with mock.patch.object(Journal, "note", return_value=failed), pytest.raises(CheckpointError, match="I/O error"):
        training.train(1)
    training.optimizer.step()
    assert torch.equal(training.weights, weights)
    assert training.engine.step == 1  # counted


def test_what_a_killed_save_has_left_does_not_count(folder):
    training = Training(folder)
    training.checkpoints.save()
    left = folder / ".step-00000007.partial"
    left.mkdir()
    (left / "__0_0.distcp").write_text("half a")
    assert Training(folder).checkpoints.load()
    training.train(1)
    training.checkpoints.save()
    assert not left.exists()


def wider(folder):
    training = Training(folder)
    training.engine.detach()
    training.model[0] = nn.Linear(4, 7)
    training.model[2] = nn.Linear(7, 3)
    training.engine = PrivacyEngine(training.model, batch_size=8, sample_size=40, steps=9, noise_multiplier=1.0)
    training.optimizer = torch.optim.Adam(training.model.parameters(), 0.1)
    training.scheduler = torch.optim.lr_scheduler.MultiStepLR(training.optimizer, [2, 5])
    training.checkpoints = Checkpointer(folder, training.engine, training.optimizer, scheduler=training.scheduler)
    return training


def grouped(folder, *decays):
    """A training whose weights and biases have settings of their own."""
    training = Training(folder)
    weights, biases = ([p for p in training.model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False))
    groups = [{"params": p, "weight_decay": decay} for p, decay in zip((weights, biases), decays, strict=True)]
    training.optimizer = torch.optim.Adam(groups, lr=0.1)
    training.scheduler = torch.optim.lr_scheduler.MultiStepLR(training.optimizer, [2, 5])
    training.checkpoints = Checkpointer(folder, training.engine, training.optimizer, scheduler=training.scheduler)
    return training


@pytest.mark.parametrize("steps", [0, 1])
def test_settings_follow_parameters_into_other_groups(folder, steps):
    """As of stages of a pipeline, which have a part of the groups, with a part of the parameters."""
    one = grouped(folder, 0.5, 0.25)
    one.train(steps)
    one.checkpoints.save()
    one.train(2)
    other = grouped(folder, 0.0, 0.0)
    other.optimizer.param_groups.reverse()
    other.checkpoints.load()
    assert [group["weight_decay"] for group in other.optimizer.param_groups] == [0.25, 0.5]
    other.train(2)
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("steps", [0, 1])
def test_saved_settings_that_differ_within_a_group_are_refused(folder, steps):
    one = grouped(folder, 0.5, 0.25)
    one.train(steps)
    one.checkpoints.save()
    other = Training(folder)
    before = str(other.state)
    with pytest.raises(
        CheckpointError, match=r"0\.bias are in one parameter group, but were saved with different weight"
    ):
        other.checkpoints.load()
    assert str(other.state) == before


def frozen_extra(folder):
    training = Training(folder)
    training.model.register_buffer("more", torch.ones(2))
    return training


OTHERS = {
    "another mechanism": (lambda f: Training(f, noise_multiplier=2.0), r"another mechanism \(noise_multiplier"),
    "another shape": (wider, r"model\.0\.weight does not fit: saved \(6, 4\) torch.float32, now \(7, 4\)"),
    "another module": (frozen_extra, r"model\.more is not in the checkpoint"),
    "another optimizer": (lambda f: Training(f, "momentum"), r"lacks dampening, momentum of SGD: .* another optimizer"),
    "no scheduler": (
        lambda f: (t := Training(f), setattr(t.checkpoints, "_others", {}))[0],
        r"others\.scheduler is in the checkpoint, but not in this training",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_something_else_is_refused_without_change(folder, other):
    training = Training(folder)
    training.train(1)
    training.checkpoints.save()
    make, reason = OTHERS[other]
    victim = make(folder)
    before = victim.state
    with pytest.raises(CheckpointError, match=reason):
        victim.checkpoints.load()
    assert str(victim.state) == str(before)
    victim.train(1)


@pytest.mark.parametrize("steps", [0, 1])
def test_settings_of_an_optimizer_without_state_fit_no_other(folder, steps):
    """SGD remembers nothing, so only its settings tell."""
    training = Training(folder, "plain")
    training.train(steps)
    training.checkpoints.save()
    victim = Training(folder, "adam")
    before = str(victim.state)
    with pytest.raises(CheckpointError, match="lacks betas, eps of Adam"):
        victim.checkpoints.load()
    assert str(victim.state) == before
    victim.train(1)


def test_loading_within_a_logical_batch_is_refused(folder):
    training = Training(folder)
    training.checkpoints.save()
    batches = training.engine.batches(TensorDataset(X, Y), 3)
    for x, _ in next(batches):
        training.model(x).sum().backward()
        with pytest.raises(LogicalBatchError, match="in the middle"):
            training.checkpoints.load()
        break


class Evil:
    folder = ""

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def reseal(path: Path) -> None:
    """Recompute the digest, as an attacker can."""
    manifest = json.loads((path / "manifest.json").read_text())
    body = {key: value for key, value in manifest.items() if key != "digest"}
    body["files"] = {name: folders.digest(path / name) for name in body["files"]}
    (path / "manifest.json").write_text(json.dumps({**body, "digest": folders.digest_of(body)}))


def test_a_checkpoint_cannot_bring_code(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Evil, "folder", str(tmp_path / "was here"))
    training = Training(folder)
    training.checkpoints.save()
    path = folder / "step-00000000"
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    reseal(path)
    with pytest.raises(CheckpointError, match="mkdir"):
        training.checkpoints.load()
    with monkeypatch.context() as patch:
        patch.setattr("dpshard.checkpoint.storage.unpack", lambda packed: None)
        patch.setattr(training.scheduler, "state_dict", lambda: {"evil": Evil()})
        training.checkpoints.save()
    with pytest.raises(CheckpointError, match="plain values"):
        training.checkpoints.load()
    assert not (tmp_path / "was here").exists()


def test_a_table_of_contents_cannot_reach_code_through_what_a_module_imports(folder):
    """From protocol 4 on, pickle follows a dotted name from attribute to attribute."""
    training = Training(folder)
    training.checkpoints.save()
    path = folder / "step-00000000"
    strings = ("torch.distributed.checkpoint.metadata", "torch.utils.collect_env.subprocess.Popen", "true", "--help")
    module, name, command, argument = (bytes([0x8C, len(text)]) + text.encode() for text in strings)
    arguments = b"](" + command + argument + b"e\x85"  # ([command, argument],)
    (path / ".metadata").write_bytes(b"\x80\x04" + module + name + b"\x93" + arguments + b"R.")
    reseal(path)
    with pytest.raises(CheckpointError, match="may run code"):
        training.checkpoints.load()


def test_what_could_not_be_read_back_is_not_saved():
    with pytest.raises(CheckpointError, match="plain values"):
        pack({"model": Training})


def test_wrong_arguments_are_refused(folder):
    training = Training(folder)
    with pytest.raises(ConfigurationError, match="keep=0"):
        Checkpointer(folder, training.engine, training.optimizer, keep=0)
    with pytest.raises(ConfigurationError, match=r"loss=3.*no state_dict"):
        Checkpointer(folder, training.engine, training.optimizer, loss=3)


@pytest.mark.parametrize("wait", [True, False], ids=["sync", "async"])
def test_a_full_disk_is_an_error_and_leaves_the_older_checkpoint(folder, monkeypatch, wait):
    training = Training(folder)
    training.checkpoints.save()
    training.train(1)

    def full(*_):
        raise OSError(28, "No space left on device")

    def save():
        training.checkpoints.save(wait=wait)
        training.checkpoints.wait()

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"the disk is full.*bytes are free"):
            save()
    resumed = Training(folder)
    assert resumed.checkpoints.load()
    assert resumed.engine.step == 0
    training.checkpoints.save()
    assert Training(folder).checkpoints.load()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        Training(tmp_path / "file" / "checkpoints").checkpoints.save()
