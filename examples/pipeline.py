"""The digits of digits.py in a pipeline: each process holds some layers, and all train as one model.

Run it by torchrun --nproc_per_node=2 pipeline.py.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine

PARTS = 4  # of a micro-batch, in the pipeline at the same time


def stage_of(rank: int, stages: int) -> nn.Module:
    """Build the whole model on every rank, and keep some layers under their own names."""
    torch.manual_seed(0)
    layers: dict[str, nn.Module] = {"enter": nn.Linear(64, 64)}
    layers |= {f"block{i}": nn.Sequential(nn.Tanh(), nn.Linear(64, 64)) for i in range(2)}
    layers |= {"head": nn.Sequential(nn.Tanh(), nn.Linear(64, 10))}
    each = -(-len(layers) // stages)
    own = list(layers)[rank * each : (rank + 1) * each]

    class Stage(nn.ModuleDict):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.values():
                x = layer(x)
            return x

    return Stage({name: layers[name] for name in own})


def main(epochs: float = 10) -> float:
    rank, stages = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    images, labels = load_digits(return_X_y=True)
    x = F.normalize(torch.tensor(images / 16 - 0.5, dtype=torch.float32))
    train = TensorDataset(x, torch.tensor(labels))

    model = stage_of(rank, stages).to(device)
    engine = PrivacyEngine(
        model,
        batch_size=700,
        sample_size=len(train),
        epochs=epochs,
        target_epsilon=3.0,
        clipping_style="layer-wise",
        model_parallel_group=dist.group.WORLD,
        model_parallel_parts={"*": "stage"},
    )
    stage = PipelineStage(model, rank, stages, device)
    schedule = Schedule1F1B(stage, PARTS, loss_fn=F.cross_entropy, scale_grads=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)

    losses: list[torch.Tensor] = []
    for logical_batch in engine.batches(train, micro_batch_size=PARTS * 64):  # the same batch on every rank
        for x, y in logical_batch:
            if rank == 0:
                schedule.step(x.to(device))
            elif rank == stages - 1:
                schedule.step(target=y.to(device), losses=losses)
                engine.record_loss(torch.stack(losses).mean())
            else:
                schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    loss = engine.metrics()["loss"]
    if rank == 0:
        print(f"loss {loss:.2f} at the end\n{engine.statement()}")
    return loss


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    main()
    dist.barrier()  # all ranks have finished
    dist.destroy_process_group()
