"""Tensors on the CPU that dpshard takes for those of an accelerator, wherever it asks before it reads their numbers."""

import sys

import pytest


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every module that asks be told that reading would wait."""
    for name, module in list(sys.modules.items()):
        if name.startswith("dpshard.") and hasattr(module, "is_at_hand"):
            monkeypatch.setattr(module, "is_at_hand", lambda x: False)
