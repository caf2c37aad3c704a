"""Random numbers that a test draws again on every machine: only its name decides them.

Without this, a run's secret comes from the operating system, and a test that needs a micro-batch with padding, say,
fails in one run out of many.
"""

import hashlib
import itertools
import os
import random

import numpy as np
import torch

import dpshard.engine
from dpshard import PrivacyEngine, checkpoint


def current_test() -> str:
    """Return the name of the test that runs, in its child processes too."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (setup)").removesuffix(" (call)")


def fix(test: str) -> None:
    """Seed torch, NumPy and Python, and make the secrets of engines functions of the test's name, process and order."""
    seed = int.from_bytes(_digest(test)[:4], "little")
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - which users' code draws from
    random.seed(seed)
    first, numbers = os.getpid(), itertools.count()

    def new_run_secret() -> bytes:
        child = str(os.getpid()) if os.getpid() != first else ""
        return _digest(test, os.environ.get("RANK", ""), child, str(next(numbers)))

    dpshard.engine.new_run_secret = new_run_secret


def give_secret(engine: PrivacyEngine, secret: bytes) -> None:
    """Let an engine that released nothing draw batches and noise by `secret`."""
    own = engine.state_dict()
    rest = {name: own[name] for name in ("thresholds", "noise", "order") if name in own}
    engine.load_state_dict(checkpoint.pack(engine.mechanism, secret, engine._budget.state_dict(), **rest))


def _digest(*parts: str) -> bytes:
    return hashlib.sha256("\0".join(parts).encode()).digest()
