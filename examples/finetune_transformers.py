"""Fine-tune a language model of Hugging Face by LoRA at epsilon 8, its parameters in shards over several processes.

    torchrun --nproc_per_node=2 finetune_transformers.py openai-community/gpt2 notes.txt

Every paragraph of the text is a protected sample. The first argument is a model's name on the Hub, or its folder.
"""

import argparse
import os
from pathlib import Path

import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset, random_split
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from dpshard.integrations.transformers import PrivateTrainer


class Paragraphs(Dataset):
    """The paragraphs of a file in tokens, all cut or padded to one length."""

    def __init__(self, file: Path, tokenizer, length: int) -> None:
        texts = [text for text in file.read_text("utf-8").split("\n\n") if text.strip()]
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        self.rows = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")

    def __len__(self) -> int:
        return len(self.rows["input_ids"])

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        row = {name: self.rows[name][i] for name in ("input_ids", "attention_mask")}
        return row | {"labels": row["input_ids"].masked_fill(row["attention_mask"] == 0, -100)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--out", default="runs/finetuned", help="where the adapters are written")
    options = parser.parse_args()

    torch.manual_seed(0)  # the same split on all processes
    data = Paragraphs(options.text, AutoTokenizer.from_pretrained(options.model), length=64)
    train, test = random_split(data, [0.9, 0.1])
    model = AutoModelForCausalLM.from_pretrained(options.model)
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    args = TrainingArguments(
        options.out,
        fsdp=int(os.environ.get("WORLD_SIZE", 1)) > 1,  # as torchrun sets it
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=8,  # a micro-batch
        gradient_accumulation_steps=16,  # the expected logical batch: 128 samples a process
        num_train_epochs=options.epochs,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = PrivateTrainer(
        model,
        args,
        train_dataset=train,
        eval_dataset=test,
        privacy={"target_epsilon": 8.0, "target_delta": 1e-5},
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if PartialState().is_main_process:
        print(f"held-out loss {loss:.3f}\n{trainer.engine.statement()}")
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
