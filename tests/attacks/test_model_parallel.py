"""Ranks that hold parts of one model, or of one sample, are refused before the first step; their look-alikes train.

Without the refusals, on two ranks: tensor parallelism by hand counts one sample for 1.09 R, context parallelism by hand
for 2.14 R where 2 R is allowed (a sample is replaced), and the ranks of both draw batches of their own.

Failure modes: 12 samples that meet those of other ranks; 14 noise of the right deviation for the sum over ranks;
17 one global draw, which ranks that make an engine each do not share.
"""

import pytest

from tests.distributed.launch import together

APART = "2 ranks share the data"
PLACED = "not by FSDP but by tensor or expert parallelism"
TALKS = "The forward of the model calls"

REFUSED = {
    "tp:alone": APART,
    "tp:ddp": APART,
    "tp:fsdp2": APART,
    "tp:denied": f"{TALKS} c10d.allreduce_",
    "tp:world": "declare them by model_parallel_parts",
    "tp:number": "must be a torch.distributed.ProcessGroup",
    "cp:ddp-function": f"{TALKS} c10d.allgather_",
    "cp:fsdp2-function": f"{TALKS} c10d.allgather_",
    "cp:ddp-nn": f"{TALKS} c10d.allgather_",
    "cp:ddp-functional": f"{TALKS} _c10d_functional.all_gather_into_tensor",
    "cp:fsdp2-torch": "computes on DTensors",
    "experts:routed": f"{TALKS} _c10d_functional.all_to_all_single",
    "experts:ignored": PLACED,
    "pipeline:alone": APART,
    "pipeline:ddp": APART,
    "pipeline:denied": "a stage of a pipeline",
    "statistics:": f"{TALKS} c10d.allreduce_",
    "honest:saved": "All 2 ranks call a Checkpointer together",
}
"""The error of each script, on both ranks. `denied`: the script says that the other rank trains another model."""

HONEST = (
    *("honest:buffers", "honest:units", "honest:frozen", "honest:attention", "honest:logged"),
    *("honest:own", "honest:own-ddp", "honest:own-fsdp2"),
    *("parallelized:norms", "parallelized:biases", "parallelized:all", "parallelized:head"),
)


@pytest.mark.parametrize("case", REFUSED)
def test_parts_of_a_model_or_of_a_sample_are_refused(case: str) -> None:
    text = REFUSED[case]
    for error, message, _ in together("model_parallel_worker.py", 2, *REFUSED)[case]:
        assert error == "ConfigurationError", message
        assert text in message
        if text in (APART, PLACED) or text.startswith(TALKS):
            assert "expert parallelism" in message
            assert "over all ranks" in message  # what works


@pytest.mark.parametrize("case", HONEST)
def test_whole_models_on_whole_samples_train(case: str) -> None:
    ranks = together("model_parallel_worker.py", 2, *HONEST)[case]
    for error, message, moved in ranks:
        assert error == "", message
        assert moved > 0
    if "own" in case:
        assert ranks[0][2] != ranks[1][2]  # separate batches and noise
