"""Train a small vision transformer with the Trainer of Hugging Face, at epsilon 4.

Only PrivateTrainer and its privacy= differ from an ordinary script.
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset, random_split
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification

from dpshard.integrations.transformers import PrivateTrainer


class Digits(Dataset):
    """The handwritten digits of scikit-learn, with the model's names of inputs."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8)
        self.labels = labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict:
        return {"pixel_values": self.images[i], "labels": self.labels[i]}


def accuracy(predictions) -> dict[str, float]:
    return {"accuracy": float((predictions.predictions.argmax(1) == predictions.label_ids).mean())}


def main(epochs: float = 20) -> float:
    torch.manual_seed(0)
    train, test = random_split(Digits(), [0.8, 0.2])
    model = ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_labels=10,
            initializer_range=0.15,  # the default is for large models
        )
    )
    args = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=128,  # a micro-batch
        gradient_accumulation_steps=5,  # the expected logical batch: 640 samples
        num_train_epochs=epochs,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=15,
        save_strategy="no",
        report_to=[],
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = PrivateTrainer(
        model,
        args,
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=accuracy,
        privacy={"target_epsilon": 4.0, "target_delta": 1e-5},
    )
    trainer.train()  # logs epsilon beside the loss
    right = trainer.evaluate()["eval_accuracy"]
    print(f"{right:.1%} of the test digits right\n{trainer.engine.statement()}")
    return right


if __name__ == "__main__":
    main()
