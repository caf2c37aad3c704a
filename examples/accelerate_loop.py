"""The digits of digits.py in a loop of accelerate, on one process or several.

Run it by `python accelerate_loop.py`, or by `accelerate launch` with any number of processes, with --use_fsdp
--fsdp_version 2 for shards.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import send_to_device
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

from dpshard.integrations.accelerate import make_engine


def main(epochs: float = 30) -> float:
    accelerator = Accelerator()
    torch.manual_seed(0)  # the same split, and the same initial model, on every process
    images, labels = load_digits(return_X_y=True)
    x = F.normalize(torch.tensor(images / 16 - 0.5, dtype=torch.float32))
    train, test = random_split(TensorDataset(x, torch.tensor(labels)), [0.8, 0.2])

    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    engine = make_engine(accelerator, model, batch_size=700, sample_size=len(train), epochs=epochs, target_epsilon=3.0)

    for logical_batch in engine.batches(train, micro_batch_size=128):  # each process gets its share
        for batch in logical_batch:
            x, y = send_to_device(batch, accelerator.device)
            accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    with torch.no_grad():
        x, y = (torch.stack([torch.as_tensor(row[i]) for row in test]).to(accelerator.device) for i in (0, 1))
        right = float((model(x).argmax(1) == y).float().mean())
    accelerator.print(f"{right:.1%} of the test digits right\n{engine.statement()}")
    return right


if __name__ == "__main__":
    main()
