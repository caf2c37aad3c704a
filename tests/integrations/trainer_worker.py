"""Trains by a PrivateTrainer on each rank, and goes on from a checkpoint; reports what came out, noise included.

Usage: torchrun trainer_worker.py FOLDER CASE..., each one of the CASES of test_transformers.py.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch

from dpshard.integrations.transformers import PrivateTrainer
from tests.integrations.test_transformers import CASES, DATA, PROMPT, Secret, arguments, collate
from tests.sums import taken_for_equal


def trainer_for(case, folder):
    make, options = CASES[case]
    args = arguments(folder, gradient_accumulation_steps=2, ddp_backend="gloo", **options)
    privacy = {"noise_multiplier": 1.0}
    trainer = PrivateTrainer(
        make(), args, train_dataset=DATA, eval_dataset=DATA, data_collator=collate, privacy=privacy
    )
    trainer.add_callback(Secret(trainer))
    return trainer


def whole(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().flatten().tolist() for p in trained]


def report(case, folder):
    trainer = trainer_for(case, folder)
    trainer.train()
    trainer.evaluate()
    found = whole(trainer.model)
    generated = trainer.model.generate(input_ids=torch.tensor(PROMPT), max_new_tokens=3).tolist()
    again = trainer_for(case, folder)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return {
        "wrapped": type(trainer.model_wrapped).__name__,
        "steps": trainer.engine.step,
        "logs": trainer.state.log_history,
        "parameters": found,
        "generated": generated,
        "resumed": whole(again.model) == found and again.engine.state_dict() == trainer.engine.state_dict(),
        "saved": sorted(os.listdir(folder / "checkpoint-2")),
    }


def main(folder, *cases):
    results = [report(case, Path(folder) / case) for case in cases]
    if int(os.environ["RANK"]) == 0:
        print("\nRESULT", json.dumps(results), flush=True)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the group, and abort an ordinary exit


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with taken_for_equal():  # both trainings have equal sums up to rounding
        main(*sys.argv[1:])
