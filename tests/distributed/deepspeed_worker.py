"""One rank of the tests of DeepSpeed's back-end; run by torchrun, prints JSON.

Usage: torchrun --nproc_per_node=W deepspeed_worker.py CASE [CASE ...]

A case is a training (see deepspeed_updates.py) or a check (see deepspeed_checks.py).
"""

import sys

from tests.distributed import deepspeed_checks, deepspeed_updates
from tests.distributed.rank import main

if __name__ == "__main__":
    main(lambda: [(deepspeed_updates if c[0].isdigit() else deepspeed_checks).run(c) for c in sys.argv[1:]])
