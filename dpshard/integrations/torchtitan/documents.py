"""The documents that the engine draws, and their rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.hf_datasets.text_datasets import DATASETS

from dpshard.errors import ConfigurationError, DataError
from dpshard.sampling.packing import IGNORED


class Documents(BaseDataLoader):
    """The documents of a data set of torchtitan's `DATASETS`, by their index; the engine draws them.

    Item i is a dict of "input_ids" and "targets" [T_i], the ids of the next tokens, cut to seq_len. For other data,
    subclass it with a `Config`, and override `__init__`, `__len__` and `ids`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Settings for reading documents."""

        dataset: str = "c4_test"
        """Name in torchtitan's DATASETS; its loader must return a data set with a length."""
        num_workers: int = 0
        pin_memory: bool = False
        prefetch_factor: int | None = None

    def __init__(self, config: Config, *, tokenizer: Any, seq_len: int, **_: Any) -> None:
        self.config, self.tokenizer, self.seq_len = config, tokenizer, seq_len
        if config.dataset not in DATASETS:
            raise ConfigurationError(
                f"dataset={config.dataset!r} is not a data set of torchtitan: {', '.join(DATASETS)}."
            )
        known = DATASETS[config.dataset]
        self._rows, self._text_of = known.loader(config.dataset_path or known.path), known.sample_processor
        if not (hasattr(self._rows, "__len__") and hasattr(self._rows, "__getitem__")):
            raise DataError(
                f"The data set {config.dataset!r} is a stream: documents cannot be drawn at random from it. Register "
                f"one in torchtitan.hf_datasets.text_datasets.DATASETS whose loader does not stream."
            )

    def __len__(self) -> int:
        return len(self._rows)

    def ids(self, index: int) -> list[int]:
        """Return all tokens of a document."""
        return self.tokenizer.encode(self._text_of(self._rows[index]), add_bos=True, add_eos=True)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the input tokens of a document, and the tokens that follow them."""
        ids = torch.tensor(self.ids(index)[: self.seq_len + 1], dtype=torch.long)
        return {"input_ids": ids[:-1], "targets": ids[1:]}

    def __iter__(self) -> Iterator[Any]:
        """Refuse: the engine draws."""
        raise ConfigurationError("The engine draws documents: leave the order to engine.batches.")

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load nothing."""


class PaddedRows:
    """Collates documents as rows of one length."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def __call__(self, documents: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return "input_ids", "targets" and "position_ids", [B, T]; padding counts nothing."""
        B, T = len(documents), self._tokens
        input_ids, targets = torch.zeros(B, T, dtype=torch.long), torch.full((B, T), IGNORED)
        for row, document in enumerate(documents):
            n = len(document["input_ids"])
            input_ids[row, :n], targets[row, :n] = document["input_ids"], document["targets"]
        return {"input_ids": input_ids, "targets": targets, "position_ids": torch.arange(T).repeat(B, 1)}
