"""A whole loop under DeepSpeed's ZeRO, on GPUs, or by gloo on CPUs.

Run it by torchrun --nproc_per_node=2 deepspeed_loop.py, or by deepspeed --num_gpus=2 deepspeed_loop.py.
"""

import logging

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine

GPU = torch.cuda.is_available()
CONFIG = {
    "train_micro_batch_size_per_gpu": 64,
    "gradient_accumulation_steps": 1,  # a logical batch has no fixed number of micro-batches
    "gradient_clipping": 0.0,  # every sample is clipped already
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def main() -> float:
    """Return the share of samples that the trained model gets right, equal on all ranks."""
    deepspeed.utils.logger.setLevel(logging.WARNING)
    if not GPU:  # a C++ extension that DeepSpeed would compile for its collectives; gloo does without
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if GPU else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if GPU else torch.device("cpu")

    torch.manual_seed(0)  # the same data and the same first weights on every rank
    x = torch.randn(2000, 20)
    dataset = TensorDataset(x, (x[:, :3].sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model_engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)

    engine = PrivacyEngine(model_engine, batch_size=400, sample_size=len(dataset), steps=20, target_epsilon=4.0)
    for logical_batch in engine.batches(dataset, micro_batch_size=64):  # of this rank
        for inputs, labels in logical_batch:
            loss = F.cross_entropy(model_engine(inputs.to(device)), labels.to(device))
            model_engine.backward(loss)
        model_engine.step()

    model_engine.eval()
    with torch.no_grad():
        right = (model_engine(x.to(device)).argmax(1).cpu() == dataset.tensors[1]).float().mean().item()
    if dist.get_rank() == 0:
        print(f"{engine.statement()}; {right:.1%} right")
    return right


if __name__ == "__main__":
    main()
    dist.barrier()
    dist.destroy_process_group()
