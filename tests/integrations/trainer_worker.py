"""Trains GPT-2 by a PrivateTrainer under DDP; reports how far along it is, and the parameters."""

import json
import os
import sys
import warnings

import torch

from dpshard.integrations.transformers import PrivateTrainer
from tests.integrations.test_transformers import DATA, Secret, arguments, collate, gpt2


def main(folder):
    args = arguments(folder, gradient_accumulation_steps=2, max_steps=3, ddp_backend="gloo")
    model = gpt2()
    privacy = {"noise_multiplier": 1.0}
    trainer = PrivateTrainer(model, args, train_dataset=DATA, data_collator=collate, privacy=privacy)
    trainer.add_callback(Secret(trainer))
    trainer.train()
    if trainer.is_world_process_zero():
        parameters = [p.detach().flatten().tolist() for p in model.parameters()]
        print(
            "\nRESULT", json.dumps([type(trainer.model_wrapped).__name__, trainer.engine.step, parameters]), flush=True
        )
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the group, and abort an orderly exit


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1])
