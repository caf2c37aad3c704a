"""The digits of digits.py on several processes, with parameters sharded by FSDP2.

Run it by torchrun --nproc_per_node=2 sharded.py.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset, random_split

from dpshard import PrivacyEngine


def main(epochs: float = 30) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    torch.manual_seed(0)  # the same split, and the same initial model, on every rank
    images, labels = load_digits(return_X_y=True)
    x = F.normalize(torch.tensor(images / 16 - 0.5, dtype=torch.float32))
    train, test = random_split(TensorDataset(x, torch.tensor(labels)), [0.8, 0.2])

    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10)).to(device)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    engine = PrivacyEngine(model, batch_size=700, sample_size=len(train), epochs=epochs, target_epsilon=3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)

    for logical_batch in engine.batches(train, micro_batch_size=128):  # each rank gets its share of one global batch
        for x, y in logical_batch:
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    with torch.no_grad():
        x, y = (torch.stack([torch.as_tensor(row[i]) for row in test]).to(device) for i in (0, 1))
        right = float((model(x).argmax(1) == y).float().mean())
    if dist.get_rank() == 0:
        print(f"{right:.1%} of the test digits right\n{engine.statement()}")
    return right


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    main()
    dist.barrier()  # all ranks have finished
    dist.destroy_process_group()
