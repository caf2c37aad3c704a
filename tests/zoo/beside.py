"""timm and torchvision, which `make venv` puts beside the environment, into .venv/timm.

torchvision's wheels are built for CUDA: with a torch for the CPU its library does not load, and its import, which
timm's needs, fails for two operators that nobody has declared. In the environment itself it would break every import
of transformers as well; so it lies beside it, and is mended here, for these tests alone.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BESIDE = Path(sys.prefix) / "timm"

BESIDE_TORCHAO = Path(sys.prefix) / "torchao"
"""torchao, which transformers would import at every start, with messages about kernels for GPUs."""

_OPERATORS = ("nms", "qnms")
_declared: list[torch.library.Library] = []  # a dropped Library drops its declarations


def import_timm() -> ModuleType:
    """Return the module; or skip the test file, and say why.

    Restores the path, which processes that tests start inherit: they would not find transformers' models.
    """
    sys.path.append(str(BESIDE))
    try:
        _import_torchvision()
        return importlib.import_module("timm")
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"timm's models are NOT TESTED: {error}. `make venv` installs it", allow_module_level=True)
    finally:
        sys.path.remove(str(BESIDE))


def _import_torchvision() -> None:
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in _OPERATORS:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]  # half imported
        importlib.import_module("torchvision")
