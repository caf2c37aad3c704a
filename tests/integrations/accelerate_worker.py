"""Trains through accelerate, and resumes from a checkpoint, on each rank; reports the parameters, with noise."""

import json
import os
import sys
import warnings

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, send_to_device
from torch.utils.data import TensorDataset

from dpshard.integrations.accelerate import make_engine, shard_on_cpu
from tests.integrations.accelerate_setup import DATA, SETTINGS, mlp
from tests.sums import taken_for_equal


def train(accelerator, model, engine, optimizer, steps):
    for logical_batch in engine.batches(TensorDataset(*DATA), 3, steps=steps):
        for micro_batch in logical_batch:
            x, y = send_to_device(micro_batch, accelerator.device)
            accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


def prepared(kind):
    accelerator = Accelerator(cpu=True)
    if kind == "fsdp2":
        shard_on_cpu(accelerator, FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap"))
    model = mlp()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    return accelerator, model, optimizer, make_engine(accelerator, model, **SETTINGS)


def whole(model):
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().flatten().tolist() for p in model.parameters()
    ]


def main(kind, folder, state):
    accelerator, model, optimizer, engine = prepared(kind)
    engine.load_state_dict(json.loads(state))
    train(accelerator, model, engine, optimizer, 2)
    accelerator.save_state(folder)
    train(accelerator, model, engine, optimizer, 2)
    found = whole(model)
    accelerator.load_state(folder)
    assert engine.step == 2
    train(accelerator, model, engine, optimizer, 2)
    assert whole(model) == found
    if accelerator.is_main_process:
        print("RESULT", json.dumps([type(model).__name__, engine.step, found]), flush=True)
    accelerator.end_training()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the group, and abort an ordinary exit


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with taken_for_equal():  # all trainings have equal sums up to rounding
        main(*sys.argv[1:])
