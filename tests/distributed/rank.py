"""What every worker script does on its rank: join the group, report to the test, leave without a hang."""

import json
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache, wraps
from typing import Any, TypeVar
from unittest import mock

import torch.distributed as dist

from tests.sums import taken_for_equal

R = TypeVar("R")


def main(work: Callable[[], Any]) -> None:
    """Run `work` on this rank, and print what all ranks return as one line of JSON."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    result = work()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, result)
    if dist.get_rank() == 0:
        print("RESULT", json.dumps(everyone), flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the group, and abort an orderly exit


def alone(train: Callable[..., R]) -> Callable[..., R]:
    """`train` as in one process: rank 0 runs it, once for equal arguments, and tells the others what it returns.

    All ranks must call it, and none may change what it returns.
    """

    @cache
    def once(*arguments: Any) -> R:
        with mock.patch("torch.distributed.is_initialized", return_value=False), taken_for_equal():
            return train(*arguments)

    @wraps(train)
    def told(*arguments: Any) -> R:
        found: list[Any] = [once(*arguments) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        return found[0]

    return told
