"""Stages of torch.distributed.pipelining give the update of one process, noise included.

Failure modes: 2 (one threshold for a sample, whatever stages hold of it); 6 (padding, in each part of a micro-batch
that a schedule makes); 14 and 15 (noise of the whole); 17 (stages are one rank to the sampler, pipelines
side by side several).
"""

import pytest

from tests.distributed.launch import FailedRankError, launch, shared

EXACT = (
    *(
        "1f1b:block-wise:auto+verified",
        "gpipe:all-layer:auto+by-hand+overwritten",
        "1f1b:all-layer:auto+verified+adaptive+evaluated",
    ),
    *("1f1b:layer-wise:ghost+nan", "gpipe:block-wise:auto+units+sums", "1f1b:all-layer:auto+resumed"),
    "1f1b:all-layer:auto+float32+verified",
)
MORE = (
    *("1f1b:all-layer:auto+checkpointed+offload+secure+overwritten", "gpipe:all-layer:auto+nan"),
    *("1f1b:all-layer:auto+discrete", "1f1b:block-wise:auto+correlated", "1f1b:param-wise:auto+in-order"),
)
ON_FOUR = ("1f1b:all-layer:auto+verified", "1f1b:block-wise:auto+by-hand")
BESIDE = (
    *("1f1b:all-layer:auto+ddp+verified+adaptive", "gpipe:layer-wise:auto+ddp+nan+bare"),
    *("gpipe:block-wise:auto+ddp+by-hand", "1f1b:all-layer:auto+ddp+resumed"),
)
"""Two pipelines of two stages."""
SHARDED = (
    *("1f1b:block-wise:auto+fsdp+verified+adaptive", "gpipe:all-layer:auto+fsdp+unsharded+by-hand"),
    "1f1b:layer-wise:auto+fsdp+apart+nan",
)
"""Two pipelines of two stages, each in FSDP2 over two ranks."""
MORE_SHARDED = (
    *("1f1b:all-layer:auto+fsdp+resumed", "1f1b:all-layer:auto+fsdp+thin+abandoned"),
    *("1f1b:all-layer:auto+fsdp+verified+unsharded+adaptive", "gpipe:block-wise:auto+fsdp+by-hand+unsharded"),
    *("gpipe:layer-wise:ghost+fsdp", "1f1b:block-wise:auto+fsdp+float32+bfloat16"),
    *("1f1b:all-layer:auto+fsdp+checkpointed+offload+secure+overwritten", "gpipe:param-wise:auto+fsdp+evaluated"),
    *("1f1b:block-wise:auto+fsdp+correlated+verified", "gpipe:all-layer:auto+fsdp+units+sums+discrete"),
)
MORE_BESIDE = (
    *("gpipe:all-layer:auto+ddp+by-hand+overwritten", "1f1b:layer-wise:ghost+ddp+evaluated"),
    *("1f1b:block-wise:auto+ddp+verified+correlated", "1f1b:all-layer:auto+ddp+float32"),
    "gpipe:all-layer:auto+ddp+units+sums+discrete",
)
PLANTED = (
    *("1f1b:all-layer:auto+ddp+own-noise", "1f1b:all-layer:auto+ddp+norms-of-all"),
    *("1f1b:block-wise:auto+ddp+same-rows", "1f1b:all-layer:auto+ddp+unsummed"),
    *("1f1b:all-layer:auto+fsdp+forgotten", "1f1b:layer-wise:auto+fsdp+noise-by-shard"),
)
MORE_PLANTED = (
    *("gpipe:all-layer:auto+fsdp+own-noise", "1f1b:all-layer:auto+fsdp+norms-of-all"),
    *("1f1b:block-wise:auto+fsdp+same-rows", "1f1b:block-wise:auto+fsdp+twice"),
)
REFUSED = {
    "gpipe:all-layer:auto+rescaled": "LogicalBatchError: The gradient of",
    "1f1b:block-wise:auto+rescaled": "LogicalBatchError: The gradient of",
    "1f1b:all-layer:auto+lost": "is incomplete",
    "1f1b:block-wise:auto+other-draw": "LogicalBatchError: The stages of the pipeline ran other chunks",
    "1f1b:block-wise:auto+flipped": "LogicalBatchError: The padding rows of a micro-batch",
    "gpipe:all-layer:auto+flipped": "LogicalBatchError: The padding rows of a micro-batch",
    "1f1b:all-layer:auto+repeated": "LogicalBatchError: One row that engine.batches",
    "1f1b:block-wise:auto+own-r": "ConfigurationError: Ranks disagree about clipping_groups",
    "1f1b:all-layer:ghost": "ConfigurationError: Two backward passes need all norms after the first one",
    "1f1b:all-layer:auto+outside": "LogicalBatchError: Model is a stage of a pipeline, and was called outside",
    "1f1b:all-layer:auto+mixed": "ConfigurationError: model_parallel_parts",
    "1f1b:all-layer:auto+renumbered": "is a parameter of the stages on ranks 0 and 1",
    "1f1b:all-layer:auto+frozen": "ConfigurationError: Stage 1 of the pipeline has no trainable parameter",
    "1f1b:all-layer:auto+inner": "ConfigurationError: A stage of a pipeline with parts in Distributed",
}
REFUSED_BESIDE = {
    "1f1b:all-layer:auto+ddp+unsummed+digested": "LogicalBatchError: The clipped sums of this logical batch differ",
    "1f1b:block-wise:auto+ddp+rescaled": "LogicalBatchError: The gradient of",
    "1f1b:block-wise:auto+fsdp+unreduced": "LogicalBatchError: The clipped sum of",
    "1f1b:block-wise:auto+fsdp+rescaled": "LogicalBatchError: The clipped sum of",
    "1f1b:block-wise:auto+fsdp+thin+clipped": "LogicalBatchError: The gradient of",
    "1f1b:all-layer:auto+fsdp+thin+amplified": "LogicalBatchError: The gradient of",
    "1f1b:all-layer:auto+ddp+thin+amplified": "LogicalBatchError: The gradient of",
    "1f1b:block-wise:auto+fsdp+half-ddp": "ConfigurationError: Ranks disagree about wrappers",
    "1f1b:all-layer:auto+fsdp+hybrid": "ConfigurationError: Hybrid sharding (HSDP) within a stage",
    "1f1b:all-layer:auto+fsdp+over-stages": "ConfigurationError: fully_shard has a mesh with ranks of other stages",
    "1f1b:all-layer:auto+fsdp+lost": "is incomplete",
}
ENDS = {
    "1f1b:block-wise:auto+another-evaluates": "ConfigurationError: No input that stage 1 of the pipeline receives",
    "1f1b:block-wise:auto+scaling": "ConfigurationError: Schedule1F1B\\(scale_grads=True\\) divides .grad",
    "1f1b:block-wise:auto+mixing+verified": "VerificationError: The gradient that this stage of the pipeline gives",
    "gpipe:all-layer:auto+time-first": "BatchLayoutError: A stage of a pipeline returned a tensor",
    "1f1b:block-wise:auto+fsdp+thin+evaluated-within": "Or schedule.eval\\(...\\) has run between two micro-batches",
    "gpipe:block-wise:auto+uneven": "ConfigurationError: A schedule of 3 micro-batches divides the 8 samples",
}

ITEMS = [
    *(pytest.param(2, case) for case in EXACT),
    *(pytest.param(2, case, marks=pytest.mark.exhaustive) for case in MORE),
    *(pytest.param(4, case) for case in (*BESIDE, *SHARDED)),
    *(pytest.param(4, case, marks=pytest.mark.exhaustive) for case in (*ON_FOUR, *MORE_BESIDE, *MORE_SHARDED)),
]
found = shared("pipeline_worker.py", ITEMS, lambda world_size, case: (world_size, case), size=7)


@pytest.mark.parametrize(("world_size", "case"), ITEMS)
def test_stages_change_no_update(world_size: int, case: str) -> None:
    for result in found(world_size, case):
        single = "float32" in case
        assert result["error"] <= (1e-6 if single else 1e-12)
        staged, alone = result["metrics"]
        assert staged == pytest.approx(alone, rel=1e-5 if single else 1e-10, nan_ok=True)
        for name in ("epsilon", "thresholds"):
            assert result[name][0] == result[name][1]


BROKEN = [
    *(pytest.param(4, case) for case in PLANTED),
    *(pytest.param(4, case, marks=pytest.mark.exhaustive) for case in MORE_PLANTED),
]
found_broken = shared("pipeline_worker.py", BROKEN, lambda world_size, case: (world_size, case))


@pytest.mark.parametrize(("world_size", "case"), BROKEN)
def test_faults_of_pipelines_side_by_side_show(world_size: int, case: str) -> None:
    results = found_broken(world_size, case)
    assert max(result["error"] for result in results) > 1e-3


FAULTS = [
    *(pytest.param(2, case, text) for case, text in REFUSED.items()),
    *(pytest.param(4, case, text) for case, text in REFUSED_BESIDE.items()),
]
found_refused = shared("pipeline_worker.py", FAULTS, lambda size, case, _: (size, case), size=len(FAULTS))


@pytest.mark.parametrize(("world_size", "case", "text"), FAULTS)
def test_all_stages_refuse_what_would_break_the_mechanism(world_size: int, case: str, text: str) -> None:
    results = found_refused(world_size, case, text)
    assert any(text in result["refused"] for result in results)
    assert all("refused" in result for result in results)


@pytest.mark.parametrize(("case", "text"), ENDS.items())
@pytest.mark.exhaustive
def test_a_stage_that_refuses_a_forward_ends_its_rank(case: str, text: str) -> None:
    with pytest.raises(FailedRankError, match=text):
        launch("pipeline_worker.py", 4 if "fsdp" in case else 2, case, timeout=60)
