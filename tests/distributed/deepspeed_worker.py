"""One rank of the tests of DeepSpeed's back-end; run by torchrun, prints JSON.

Usage: torchrun --nproc_per_node=W deepspeed_worker.py CASE [CASE ...]

A case is a training (see deepspeed_updates.py) or a check (see deepspeed_checks.py).
"""

import sys

from tests import seeds
from tests.distributed import deepspeed_checks, deepspeed_updates
from tests.distributed.rank import main
from tests.sums import taken_for_equal


def run(case: str) -> object:
    seeds.fix(case)  # whatever has run before it in this process
    if not case[0].isdigit():
        return deepspeed_checks.run(case)
    with taken_for_equal():  # the sums of both trainings, which they are but for rounding
        return deepspeed_updates.run(case)


if __name__ == "__main__":
    main(lambda: [run(case) for case in sys.argv[1:]])
