"""The cost of a whole private run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpshard.accounting import SampledMechanism, calibrate, epsilon_of
from dpshard.applications.planner.estimates import Estimate, Plan
from dpshard.applications.planner.hardware import Hardware
from dpshard.config import BatchSchedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Poisson batches under `target_epsilon` or `noise_multiplier`."""

    batch_size: int
    sample_size: int
    steps: int
    target_delta: float
    target_epsilon: float | None = None
    noise_multiplier: float | None = None

    def guarantee(self) -> tuple[float, float]:
        """Return (noise multiplier, epsilon)."""
        schedule = BatchSchedule((self.batch_size,) * self.steps)
        sigma = math.nan if self.noise_multiplier is None else self.noise_multiplier
        mechanism = SampledMechanism(schedule=schedule, sample_size=self.sample_size, noise_multiplier=sigma)
        if self.noise_multiplier is None:
            assert self.target_epsilon is not None
            mechanism = calibrate(mechanism, target_epsilon=self.target_epsilon, target_delta=self.target_delta)
        return mechanism.noise_multiplier, epsilon_of(mechanism.releases(), self.target_delta, "pld")

    def micro_batches(self, per_round: int) -> float:
        """Return the mean of max(1, ceil(n / per_round)), n binomial."""
        from scipy.stats import binom

        drawn = binom(self.sample_size, self.batch_size / self.sample_size)
        most = math.ceil((self.batch_size + 10 * math.sqrt(self.batch_size)) / per_round)
        return 1.0 + sum(float(drawn.sf(k * per_round)) for k in range(1, most + 1))


@dataclass(frozen=True, slots=True)
class RunCost:
    """Costs at one micro-batch."""

    micro_batch: int
    micro_batches: float
    padding: float
    step_seconds: float
    gpu_hours: float


def run_cost(plan: Plan, estimate: Estimate, run: Run, hardware: Hardware, micro_batch: int) -> RunCost:
    """Return the cost at a micro-batch."""
    times = plan.times(estimate, hardware, micro_batch=micro_batch)
    per_round = micro_batch * plan.setup.data_ranks
    rounds = run.micro_batches(per_round)
    update = times.phases["update"]
    seconds = rounds * (times.total - update) / plan.setup.micro_batches + update
    hours = run.steps * seconds * plan.setup.ranks / 3600
    return RunCost(micro_batch, rounds, 1 - run.batch_size / (rounds * per_round), seconds, hours)


@dataclass(frozen=True, slots=True)
class RunCosts:
    """What a whole run costs."""

    run: Run
    noise_multiplier: float
    epsilon: float
    by_label: dict[str, RunCost | None]


def run_costs(plan: Plan, run: Run, hardware: Hardware) -> RunCosts:
    """Return the costs of a run."""
    return RunCosts(run, *run.guarantee(), {e.label: best_run_cost(plan, e, run, hardware) for e in plan.estimates})


def best_run_cost(plan: Plan, estimate: Estimate, run: Run, hardware: Hardware) -> RunCost | None:
    """Return the least cost, or None."""
    largest = plan.micro_batch if estimate.largest_micro_batch is None else estimate.largest_micro_batch
    enough = math.ceil((run.batch_size + 6 * math.sqrt(run.batch_size)) / plan.setup.data_ranks)
    sizes = range(1, min(largest, enough) + 1)
    costs = [run_cost(plan, estimate, run, hardware, size) for size in sizes]
    return min(costs, key=lambda cost: cost.gpu_hours, default=None)
