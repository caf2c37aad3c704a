"""What processes have imported before they are forked; see forks.py."""

# ruff: noqa: F401

import contextlib
import gc

import fsspec  # which torch.distributed.checkpoint imports late
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.tensor

import dpshard.applications.audit
import dpshard.applications.cli.training
import dpshard.backends.ddp
import dpshard.backends.fsdp2
import tests.oracle
from dpshard.kernels.native.library import library

with contextlib.suppress(ImportError):
    import tests.distributed.deepspeed_checks
    import tests.distributed.deepspeed_updates

with contextlib.suppress(ImportError):
    import deepspeed.runtime.zero.muon.muon_optimizer  # which every engine imports, and inductor with it

with contextlib.suppress(ImportError):
    import transformers.models.gpt2.modeling_gpt2

library()  # which it tries out for a quarter of a second, in one thread

gc.collect()
gc.freeze()  # a fork that collects garbage need not look at what it has inherited, nor copy its pages
