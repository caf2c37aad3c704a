"""A model under FSDP2 cuts samples into pieces; every rank reports, case by case, the error and the released gradients.

Usage: torchrun --nproc_per_node=2 pieces_worker.py CASE...
"""

import sys
import warnings

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from dpshard import PrivacyEngine
from dpshard.errors import BatchLayoutError
from tests.attacks.test_pieces import D, Pieces
from tests.distributed.rank import main
from tests.oracle import ramp_loss

SAMPLES, R = 4, 0.1


def inputs() -> list[Tensor]:
    """The short samples have one piece each, the long ones four."""
    draws = torch.Generator().manual_seed(1)
    return [torch.randn(SAMPLES, T, D, generator=draws, dtype=torch.float64) for T in (8, 32)]


def model() -> Pieces:
    torch.manual_seed(0)
    return Pieces().double()


def outcome(case: str) -> tuple[str, list[float]]:
    private, (short, long) = model(), inputs()
    fully_shard(private)
    facts = {
        "batch_size": SAMPLES,
        "sample_size": 100,
        "steps": 2,
        "noise_multiplier": 0,
        "max_grad_norm": R,
        "clipping_fn": "abadi",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = PrivacyEngine(private, **facts)
        if case == "verified first":
            engine.verify(long)
        half = slice(None, 2) if dist.get_rank() == 0 else slice(2, None)
        released = torch.zeros(0)
        try:
            for x in (short, long):
                ramp_loss(private(x[half])).backward()
                engine.privatize()
                released = torch.cat([p.grad.full_tensor().flatten() for p in private.parameters()])
                private.zero_grad()
        except BatchLayoutError as error:
            return str(error), released.tolist()
    return "", released.tolist()


if __name__ == "__main__":
    main(lambda: [outcome(case) for case in sys.argv[1:]])
