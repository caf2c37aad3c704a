"""The digits of digits.py in Lightning: an ordinary LightningModule, and a callback that makes its fit private."""

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from dpshard.integrations.lightning import PrivateTraining


class Digits(L.LightningModule):
    """A classifier of handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.network(x), y)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self.network(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.9)


def main(epochs: int = 20) -> float:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x = F.normalize(torch.tensor(images / 16 - 0.5, dtype=torch.float32))
    train, test = random_split(TensorDataset(x, torch.tensor(labels)), [0.8, 0.2])

    private = PrivateTraining(
        DataLoader(train, batch_size=480),  # the expected logical batch
        micro_batch_size=128,
        target_epsilon=3.0,
        target_delta=1e-5,
    )
    trainer = L.Trainer(
        max_epochs=epochs, callbacks=[private], logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Digits(), private.loader, DataLoader(test, batch_size=len(test)))

    right = float(trainer.callback_metrics["accuracy"])
    print(f"{right:.1%} of the test digits right\n{private.engine.statement()}")
    return right


if __name__ == "__main__":
    main()
