"""Training scripts as one writes them for Opacus, in the style of its examples.

A test changes `opacus` into `dpshard.integrations.opacus` in their imports, and nothing else.
"""

MNIST = """
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 2, padding=1)
        self.conv2 = nn.Conv2d(4, 8, 3, 2)
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 1)
        return self.fc(x.view(-1, 8))


x = torch.randn(200, 1, 8, 8)
train_loader = DataLoader(TensorDataset(x, torch.arange(200) % 10), batch_size=20)
for run in range(2):  # the private loader of the first run is passed to make_private of the second
    model = ConvNet()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0)
    privacy_engine = PrivacyEngine(secure_mode=bool(run))
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    criterion = nn.CrossEntropyLoss()
    for epoch in range(2):
        model.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(data), target)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(x).argmax(1)
    steps = 2 * len(train_loader)
    torch.save(model.state_dict(), FOLDER / "model.pt")
"""

CIFAR = """
import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(
    nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 8, 3), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
)
errors = ModuleValidator.validate(model, strict=False)
assert len(errors) == 1 and not ModuleValidator.is_valid(model)
model = ModuleValidator.fix(model)
assert not ModuleValidator.validate(model, strict=False)

dataset = TensorDataset(torch.randn(120, 3, 8, 8), torch.arange(120) % 10)
loader = DataLoader(dataset, batch_size=40, shuffle=True, num_workers=0)
optimizer = optim.RMSprop(model.parameters(), lr=1e-3)
scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
privacy_engine = PrivacyEngine()
count = sum(p.requires_grad for p in model.parameters())
model, optimizer, loader = privacy_engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=loader, epochs=2, target_epsilon=5.0, target_delta=1e-5,
    max_grad_norm=[1.2 / np.sqrt(count)] * count, clipping="per_layer",
)
criterion = nn.CrossEntropyLoss()
steps = 0
optimizer.attach_step_hook(lambda _: globals().update(steps=steps + 1))
for epoch in range(2):
    accuracies = []
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=16, optimizer=optimizer) as memory_safe_loader:
        for i, (images, target) in enumerate(memory_safe_loader):
            assert 0 < len(images) <= 16
            optimizer.zero_grad()
            output = model(images)
            loss = criterion(output, target)
            accuracies.append(np.mean(output.detach().argmax(1).numpy() == target.numpy()))
            loss.backward()
            optimizer.step()
    scheduler.step()
assert optimizer.param_groups[0]["lr"] < 1e-4
assert 4.0 < privacy_engine.get_epsilon(1e-5) <= 5.0
assert privacy_engine.accountant.get_epsilon(delta=1e-5) == privacy_engine.get_epsilon(delta=1e-5)
"""

CHARACTERS = """
import torch
from opacus import PrivacyEngine
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


class Classifier(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.embedding = nn.Embedding(30, 6)
        self.rnn = rnn(6, 8, num_layers=1, bidirectional=False, batch_first=True)
        self.out_layer = nn.Linear(8, 3)

    def forward(self, x, hidden=None):
        x, _ = self.rnn(self.embedding(x), hidden)
        return self.out_layer(x[:, -1, :])


def padded_collate(batch, padding_idx=0):
    x = pad_sequence([row[0] for row in batch], batch_first=True, padding_value=padding_idx)
    return x, torch.stack([row[1] for row in batch]).long()


names = [(torch.randint(1, 30, (2 + i % 4,)), torch.tensor(i % 3)) for i in range(60)]
steps = 0
for rnn in (DPLSTM, DPGRU, DPRNN):
    train_loader = DataLoader(names, batch_size=20, collate_fn=padded_collate)
    model = Classifier(rnn)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    privacy_engine = PrivacyEngine(accountant="rdp")
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.5
    )
    for x, y in train_loader:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
steps = len(train_loader)
"""

GHOST = """
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.attention = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 11)

    def forward(self, ids):
        return self.head(self.attention(self.embedding(ids)))


ids = torch.randint(0, 11, (80, 5))
labels = ids.roll(-1, 1).masked_fill(torch.rand(80, 5) < 0.4, -100)
dataloader = DataLoader(TensorDataset(ids, labels), batch_size=16)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss(ignore_index=-100)
privacy_engine = PrivacyEngine()
model, optimizer, criterion, dataloader = privacy_engine.make_private(
    module=model, optimizer=optimizer, data_loader=dataloader, criterion=criterion,
    noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode="ghost",
)
losses = []
for input_ids, target in dataloader:
    optimizer.zero_grad()
    logits = model(input_ids)
    loss = criterion(logits.view(-1, 11), target.view(-1), shape=logits.shape)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
steps = len(dataloader)
"""

SHARDED = """
import torch
import torch.distributed as dist
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    dataset = TensorDataset(torch.randn(60, 4), torch.arange(60) % 3)
    train_loader = DataLoader(dataset, batch_size=20, sampler=DistributedSampler(dataset))
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    model = FSDP2Wrapper(model, mp_policy=None, opacus_high_precision_layers=(nn.LayerNorm,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    privacy_engine = PrivacyEngine()
    model, optimizer, criterion, train_loader = privacy_engine.make_private(
        module=model, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), data_loader=train_loader,
        noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode="ghost_fsdp", poisson_sampling=False,
    )
    with BatchMemoryManager(data_loader=train_loader, max_physical_batch_size=8, optimizer=optimizer) as loader:
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    steps = len(train_loader)
    assert type(model._module[0]).__name__ == "FSDPLinear"
finally:
    dist.destroy_process_group()
"""

LIGHTNING = """
import lightning as pl
import torch
from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from opacus.lightning import DPLightningDataModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Data(pl.LightningDataModule):
    def setup(self, stage):
        self.dataset = TensorDataset(torch.randn(60, 4), torch.arange(60) % 3)

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=20, shuffle=True)


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.privacy_engine = PrivacyEngine()

    def forward(self, x):
        return self.layer(x)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        data_loader = self.trainer.datamodule.train_dataloader()
        dp_model, optimizer, dataloader = self.privacy_engine.make_private(
            module=self, optimizer=optimizer, data_loader=data_loader, noise_multiplier=1.0, max_grad_norm=1.0,
            poisson_sampling=isinstance(data_loader, DPDataLoader),
        )
        return optimizer

    def training_step(self, batch, batch_idx):
        data, target = batch
        return nn.functional.cross_entropy(self(data), target)


model = Classifier()
data = Data()
trainer = pl.Trainer(
    max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    default_root_dir=FOLDER, accelerator="cpu",
)
trainer.fit(model, DPLightningDataModule(data))
privacy_engine, steps = model.privacy_engine, trainer.global_step
assert steps == 6
assert "Poisson" in privacy_engine.engine.statement()
"""

SCRIPTS = {
    "sharded": SHARDED,
    "lightning": LIGHTNING,
    "mnist": MNIST,
    "cifar": CIFAR,
    "characters": CHARACTERS,
    "ghost": GHOST,
}
