"""What every worker script does on its rank: join the group, report to the test, leave without a hang."""

import json
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


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
