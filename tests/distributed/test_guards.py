"""What only several ranks can do wrong is told on all of them, before a parameter moves.

Failure modes: 8 gradients that reach a parameter around the anchors; 14 sums that were not summed over ranks, which are
W times as large as the noise is made for, and ranks with other settings, which add other noise; 17 one global draw;
19 sums that are changed before their noise; 24 ranks that resume at different steps, and release one of them twice.
"""

import pytest

from tests.distributed.launch import together

REFUSED = {
    "ddp:no-sync": ("LogicalBatchError", "did not reduce"),
    "ddp:past-ddp": ("LogicalBatchError", "did not reduce"),
    "ddp:late": ("LogicalBatchError", "did not reduce"),
    "ddp:compressed": ("ConfigurationError", "communication hook (fp16_compress_hook)"),
    "ddp:fused-optimizer": ("ConfigurationError", "communication hook"),
    "ddp:join": ("ConfigurationError", "join()"),
    "ddp:static": ("ConfigurationError", "static_graph"),
    "ddp:idle-scaled": ("LogicalBatchError", "head.weight was changed"),
    "ddp:written": ("LogicalBatchError", "was written after backward()"),
    "fsdp2:written": ("LogicalBatchError", "was written after backward()"),
    "ddp:written-last": ("LogicalBatchError", "was written after backward()"),
    "fsdp2:written-last": ("LogicalBatchError", "was written after backward()"),
    "fsdp2:foreach-last": ("LogicalBatchError", "was written after backward()"),
    "fsdp1:": ("ConfigurationError", "Use FSDP2"),
    "fsdp2:clipped": ("LogicalBatchError", "weight was changed"),
    "fsdp2:scaled": ("LogicalBatchError", "weight was changed"),
    "fsdp2:scaled-data": ("LogicalBatchError", "weight was changed"),
    "fsdp2:zeroed-unsynced": ("LogicalBatchError", "weight was thrown away"),
    "fsdp2:left-by-unshard": ("UnsupportedParameterError", "weight: FSDP reduced a gradient"),
    "fsdp2:method": ("UnsupportedParameterError", "weight: FSDP reduced a gradient"),
    "fsdp2:verified-mixing": ("VerificationError", "mixes the samples"),
    "ranks:sigma": ("ConfigurationError", "Ranks disagree about noise_multiplier."),
    "ranks:size": ("ConfigurationError", "Ranks disagree about sample_size."),
    "ranks:state": ("CheckpointError", "different states"),
}


HONEST = ("ddp:", "ddp:views", "fsdp2:", "fsdp2:verified")


@pytest.mark.parametrize("case", REFUSED)
def test_what_ranks_do_wrong_is_refused_on_all_of_them(case: str) -> None:
    name, text = REFUSED[case]
    for error, message, moved in together("guards_worker.py", 2, *REFUSED)[case]:
        assert error == name, message
        assert text in message
        assert moved == 0


@pytest.mark.parametrize("case", HONEST)
def test_the_same_script_without_the_fault_trains(case: str) -> None:
    for error, message, moved in together("guards_worker.py", 2, *HONEST)[case]:
        assert error == "", message
        assert moved > 0 or case.startswith("fsdp2")
