"""`python -m benchmarks.finetuning`: starts the processes, fine-tunes, and writes JSON and a table."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import warnings
from pathlib import Path

import torch
import transformers
from accelerate import PartialState

import benchmarks.finetuning
import dpshard
from benchmarks.finetuning.results import table
from benchmarks.finetuning.tasks import FULL, QUICK, digits, text
from benchmarks.finetuning.training import fine_tune, pretrained


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.finetuning",
        description=benchmarks.finetuning.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nproc", type=int, default=2, help="processes to start on this machine")
    parser.add_argument("--shard", choices=["fsdp2", "ddp"], default="fsdp2", help="how they share the model")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"), help="where models and results are kept")
    parser.add_argument("--quick", action="store_true", help="tiny models and few steps, to see it run")
    options = parser.parse_args()
    if options.nproc > 1 and "RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.nproc}"]
        sys.exit(subprocess.call([*torchrun, "-m", "benchmarks.finetuning", "--", *sys.argv[1:]]))

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("dpshard").setLevel(logging.ERROR)  # the max_grad_norm of one Trainer applies to both
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    scale = QUICK if options.quick else FULL
    runs = []
    for make in (text, digits):
        task = make(scale)
        folder = pretrained(task, options.shard, options.out)
        for what in ("all weights", "LoRA"):
            runs.append(fine_tune(task, what, folder, options.shard))
            if PartialState().is_main_process:
                print(table({"runs": runs[-1:]}).splitlines()[-1], flush=True)
    results = {
        "kind": "fine-tuning",
        "processes": PartialState().num_processes,
        "shard": options.shard,
        "device": PartialState().device.type,
        "cores": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            **{library.__name__: library.__version__ for library in (dpshard, torch, transformers)},
        },
        "runs": runs,
    }
    if PartialState().is_main_process:
        (options.out / "finetuning.json").write_text(json.dumps(results, indent=2) + "\n")
        print(table(results), flush=True)
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads may outlive the group, and abort an orderly exit
