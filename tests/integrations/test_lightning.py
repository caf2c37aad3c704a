"""Lightning's callback: updates are those of the engine, sanity checks cost nothing, checkpoints keep the ledger.

Failure modes: 19 test_a_fit_is_the_engines_own_loop; 21 the same (steps of sanity checks are not charged);
24 test_a_resumed_fit_is_the_same_bit_for_bit.
"""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpshard import PrivacyEngine
from dpshard.errors import CheckpointError, ConfigurationError, EngineInUseError, LogicalBatchError

L = pytest.importorskip("lightning")

from dpshard.integrations.lightning import PrivateTraining  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


@pytest.fixture(autouse=True)
def environment():
    """Lightning's strategies leave their addresses in the environment, and other tests would use them."""
    with mock.patch.dict(os.environ):
        yield


N, D, C = 40, 5, 3
torch.manual_seed(0)
DATA = TensorDataset(torch.randn(N, D), torch.arange(N) % C)


class Classifier(L.LightningModule):
    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, C))
        self.seen, self.norms = [], []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen.append(len(x))
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def on_after_backward(self):
        self.norms.append(float(self.net[0].weight.grad.norm()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def private_training(**options):
    settings = {"noise_multiplier": 1.0, "micro_batch_size": 3}
    return PrivateTraining(DataLoader(DATA, batch_size=8, shuffle=True), **{**settings, **options})


def fit(private, module, folder, ckpt_path=None, **options):
    settings = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "log_every_n_steps": 5,
    }
    trainer = L.Trainer(default_root_dir=folder, **{"callbacks": [private], **settings, **options})
    trainer.fit(module, private.loader, DataLoader(DATA, batch_size=20), ckpt_path=ckpt_path, weights_only=True)
    return trainer


def same(model, other):
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_a_step_that_reorders_its_rows_needs_batches_without_padding(tmp_path):
    class Reversing(Classifier):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return super().training_step((x.flip(0), y.flip(0)), batch_idx)

    # A micro-batch is as large as the data set, so every step has several samples followed by padding.
    with pytest.raises(LogicalBatchError, match="pad=False"):
        fit(private_training(micro_batch_size=len(DATA)), Reversing(), tmp_path)
    private = private_training(pad=False)
    assert fit(private, Reversing(), tmp_path).global_step == private.engine.step == 10


def test_a_fit_is_the_engines_own_loop(tmp_path):
    """With noise; clipping of the private gradients by Lightning is off."""
    private, module = private_training(), Classifier()
    secret = []

    class Secret(L.Callback):
        def on_train_start(self, trainer, pl_module):
            assert private.engine.step == 0  # after the sanity check
            secret.append(private.engine.state_dict())

    trainer = fit(private, module, tmp_path, callbacks=[private, Secret()])
    assert trainer.global_step == private.engine.step == 10
    assert set(module.seen) == {3}
    assert len(module.norms) == 10  # hooks see private gradients, once a step
    assert float(trainer.callback_metrics["epsilon"]) == pytest.approx(private.engine.epsilon())
    assert "training_step" not in vars(module)

    plain = Classifier()
    engine = PrivacyEngine(plain, batch_size=8, sample_size=N, steps=10, noise_multiplier=1.0)
    engine.load_state_dict(secret[0])
    optimizer = plain.configure_optimizers()
    for logical_batch, norm in zip(engine.batches(DATA, 3), module.norms, strict=True):
        for x, y in logical_batch:
            F.cross_entropy(plain.net(x), y).backward()
        optimizer.step()
        assert float(plain.net[0].weight.grad.norm()) == norm
        optimizer.zero_grad()
    assert same(module, plain)
    with pytest.raises(EngineInUseError, match="has already fitted a model"):
        fit(private, module, tmp_path)


def test_a_resumed_fit_is_the_same_bit_for_bit(tmp_path):
    """From the middle of an epoch, with dropout."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    private, module = private_training(), Classifier(0.5)
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    fit(private, module, tmp_path, callbacks=[private, saving], enable_checkpointing=True)
    again, resumed = private_training(), Classifier(0.5)
    torch.manual_seed(99)
    trainer = fit(again, resumed, tmp_path, ckpt_path=tmp_path / "step=3.ckpt")
    assert trainer.global_step == again.engine.step == 10
    assert again.engine.state_dict() == private.engine.state_dict()
    assert same(module, resumed)


def test_a_checkpoint_without_a_ledger_is_refused(tmp_path):
    trainer = L.Trainer(
        default_root_dir=tmp_path, max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    module = Classifier()
    trainer.fit(module, DataLoader(DATA, batch_size=8))
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointError, match="without this callback"):
        fit(private_training(), Classifier(), tmp_path, ckpt_path=tmp_path / "plain.ckpt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grad_batches": 2}, "leave it at 1"),
        ({"max_epochs": -1}, "a private run has a fixed length"),
        ({"strategy": "ddp", "devices": 1}, "DDPStrategy on 1 devices"),
    ],
)
def test_what_is_not_private_is_refused(options, message, tmp_path, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # restored afterwards; Lightning's strategies set them
        monkeypatch.delenv(name)
    try:
        with pytest.raises(ConfigurationError, match=message):
            fit(private_training(), Classifier(), tmp_path, **options)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:When using `Trainer")
def test_accumulation_that_begins_later_is_refused(tmp_path):
    """Lightning divides the loss of the last micro-batch only, so a gradient would depend on its place."""
    private = private_training()
    later = L.pytorch.callbacks.GradientAccumulationScheduler({1: 2})
    with pytest.raises(ConfigurationError, match="accumulate_grad_batches"):
        fit(private, Classifier(), tmp_path, callbacks=[private, later])
    assert private.engine.step == 5  # the first epoch


def test_a_module_with_a_loop_of_its_own_is_refused(tmp_path):
    module = Classifier()
    module.automatic_optimization = False
    with pytest.raises(ConfigurationError, match=r"engine\.batches"):
        fit(private_training(), module, tmp_path)


def test_another_loader_is_refused(tmp_path):
    private = private_training()
    trainer = L.Trainer(callbacks=[private], max_epochs=1, default_root_dir=tmp_path, logger=False, accelerator="cpu")
    with pytest.raises(ConfigurationError, match=r"call fit\(module, private\.loader\)"):
        trainer.fit(Classifier(), DataLoader(DATA, batch_size=8))


def test_a_loader_without_its_callback_is_refused():
    with pytest.raises(ConfigurationError, match=r"Trainer\(callbacks=\[private\]\)"):
        next(iter(private_training().loader))


def test_a_loader_without_a_batch_size_is_refused():
    with pytest.raises(ConfigurationError, match="has no batch_size, which is the expected logical batch"):
        PrivateTraining(DataLoader(DATA, batch_size=None), noise_multiplier=1.0)
