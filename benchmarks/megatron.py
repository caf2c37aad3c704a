"""Megatron-LM's table of ordinary training on A100s, beside the planner's times of the same runs.

Narayanan et al. 2021, arXiv:2104.04473, Table 1. Micro-batches and chunks of stages are those of Megatron-LM's
`examples/sc21/run_table_1.sh`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks import results_files
from dpshard.applications.planner import Setup, Transformer
from dpshard.applications.planner.hardware import Hardware
from dpshard.applications.planner.pipelines import PipelinePlan, make_pipeline_plan

PAGE = results_files.ROOT / "docs/planning.md"
BEGIN, END = "<!-- table of Megatron-LM -->", "<!-- /table of Megatron-LM -->"
SEQ, VOCABULARY = 2048, 51200
CLUSTER = Hardware(gpu="a100", intra=300.0, inter=25.0)
"""Selene: NVLink 3 has 300 GB/s a GPU and direction; a node of 8 GPUs has 8 InfiniBand cards of 200 Gbit/s. The other
values are the planner's, and `mfu` is fitted."""


@dataclass(frozen=True, slots=True)
class Row:
    """A run of the table."""

    billions: float
    """Parameters."""
    heads: int
    width: int
    layers: int
    tp: int
    pp: int
    gpus: int
    batch: int
    """Samples of a step."""
    micro_batch: int
    chunks: int
    """Parts of a stage in an interleaved schedule; 1 is 1F1B."""
    tflops: int
    """Published TFLOP/s of a GPU, by their formula."""

    @property
    def flops(self) -> float:
        """Operations of a step by their formula (3), in which every activation is computed again."""
        inner = 1 + SEQ / (6 * self.width) + VOCABULARY / (16 * self.layers * self.width)
        return 96.0 * self.batch * SEQ * self.layers * self.width**2 * inner

    @property
    def parts(self) -> int:
        """Micro-batches of a pipeline."""
        return self.batch * self.tp * self.pp // (self.gpus * self.micro_batch)

    def plan(self) -> PipelinePlan:
        """Count the run."""
        shape = Transformer(width=self.width, layers=self.layers, heads=self.heads, vocabulary=VOCABULARY, seq=SEQ)
        setup = Setup(
            model=shape, ranks=self.gpus, shard="ddp", micro_batches=self.parts, checkpointing=True, tp=self.tp
        )
        return make_pipeline_plan(setup, pp=self.pp, micro_batch=self.micro_batch, clippings=())

    def planned(self, plan: PipelinePlan, mfu: float, chunks: int = 1) -> float:
        """Return the planned TFLOP/s of a GPU, by their formula.

        With `chunks` pipelines fill and drain in as small a share of the time as in a schedule that interleaves them.
        """
        times = plan.times(plan.estimates[0], replace(CLUSTER, mfu=mfu))
        filling = times.span * (self.pp - 1) / (self.parts + self.pp - 1)
        return self.flops / (times.total - filling * (1 - 1 / chunks)) / self.gpus / 1e12

    def fit(self, plan: PipelinePlan, chunks: int = 1) -> float:
        """Return the share of the GPU's peak at which the plan is as fast as the published run."""
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self.planned(plan, middle, chunks) < self.tflops else (low, middle)
        return (low + high) / 2


ROWS = (
    Row(1.7, 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
    Row(3.6, 32, 3072, 30, 2, 1, 64, 512, 16, 1, 138),
    Row(7.5, 32, 4096, 36, 4, 1, 128, 512, 16, 1, 142),
    Row(18.4, 48, 6144, 40, 8, 1, 256, 1024, 8, 1, 135),
    Row(39.1, 64, 8192, 48, 8, 2, 512, 1536, 4, 1, 138),
    Row(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 2, 3, 140),
    Row(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 148),
    Row(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 1, 2, 155),
    Row(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 1, 3, 163),
    Row(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 163),
)


def measure(rows: Sequence[Row] = ROWS, on_row: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Return the plans of `rows` as plain figures. The share of the peak is fitted to the first one."""
    found: list[dict[str, Any]] = []
    for row in rows:
        plan = row.plan()
        found.append(figures_of(row, plan, found[0]["mfu"] if found else row.fit(plan)))
        on_row(f"{row.billions:g} billion parameters")
    return found


def figures_of(row: Row, plan: PipelinePlan, mfu: float) -> dict[str, Any]:
    """Return a run's plan as plain figures."""
    times = plan.times(plan.estimates[0], replace(CLUSTER, mfu=mfu))
    return {
        "row": asdict(row),
        "parameters": sum(plan.elements),
        "parts": row.parts,
        "mfu": mfu,
        "planned": row.planned(plan, mfu),
        "interleaved": row.planned(plan, mfu, row.chunks),
        "needed": row.fit(plan, row.chunks),
        "within": times.within / times.span,
        "bubble": times.bubble,
        "flops_over_formula": _counted(plan) / row.flops,
    }


def _counted(plan: PipelinePlan) -> int:
    """Return the operations of a step of all ranks."""
    of_part = sum(stage.forward + stage.backward for stage in plan.estimates[0].stages)
    return of_part * plan.setup.tp * plan.setup.micro_batches * plan.replicas


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the page."""
    lines = [
        "| billion parameters | GPUs | tp | pp | parts | within stages | stages wait | published | planned "
        "| over published | interleaved, over published | MFU that the run needs |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for found in rows:
        row = Row(**found["row"])
        interleaved = f"{found['interleaved'] / row.tflops:.2f} ({row.chunks})" if row.chunks > 1 else "–"
        cells = [
            f"{row.billions:,.1f}", f"{row.gpus:,}", row.tp, row.pp, f"{row.parts} x {row.micro_batch}",
            f"{found['within']:.1%}", f"{abs(found['bubble']):.1%}", row.tflops, f"{found['planned']:.0f}",
            f"{found['planned'] / row.tflops:.2f}", interleaved, f"{found['needed']:.2f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def page(before: str, figures: Mapping[str, Any]) -> str:
    """Return docs/planning.md with the table."""
    head, _, rest = before.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{table(figures['rows'])}\n\n{END}{rest.partition(END)[2]}"
