"""Trains preferences by a PrivateDPOTrainer on each rank, and reports the parameters before and after.

Without noise, which depends on the last bit of the sums.

Usage: torchrun dpo_worker.py FOLDER ACCUMULATION
"""

import sys
from typing import Any

import datasets
import torch
import trl

from dpshard.integrations.trl import PrivateDPOTrainer
from tests.distributed.rank import main
from tests.integrations.test_transformers import Secret, gpt2
from tests.integrations.test_trl import PRIVACY, N, arguments, tokenizer


def trained(folder: str, accumulation: int) -> list[Any]:
    rows = [{"prompt": "1 2", "chosen": f"{1 + i % 9} 3", "rejected": f"{1 + i % 7}"} for i in range(N)]
    torch.manual_seed(0)
    model, reference = gpt2(), gpt2()
    options = {"max_length": None, "max_steps": 2, "learning_rate": 0.5, "gradient_accumulation_steps": accumulation}
    trainer = PrivateDPOTrainer(
        model,
        reference,
        arguments(trl.DPOConfig, folder, **options, eval_strategy="steps", eval_steps=1, ddp_backend="gloo"),
        train_dataset=datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(rows[:4]),
        processing_class=tokenizer(),
        privacy=PRIVACY,
    )
    trainer.add_callback(Secret(trainer))
    before = whole(trainer.model)
    trainer.train()
    return [before, whole(trainer.model), type(trainer.model_wrapped).__name__]


def whole(model: torch.nn.Module) -> list[float]:
    return [x for p in model.parameters() for x in p.detach().flatten().tolist()]


if __name__ == "__main__":
    main(lambda: trained(sys.argv[1], int(sys.argv[2])))
