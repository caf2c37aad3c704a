"""The ledger of a run: its releases, their epsilon, and the check of a further release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

from dpshard.accounting.bounds import bound_of, epsilon_of, require_accountant, require_supported
from dpshard.accounting.calibration import largest_that_fits
from dpshard.accounting.releases import Counts, Relation, Release, in_figures, relation_of, rounded_up
from dpshard.accounting.sampling_schemes import SamplingScheme, cost_of
from dpshard.accounting.spans import Span, append, cost, first_missing
from dpshard.config import AccountantName
from dpshard.errors import CheckpointError


class PrivacyLedger:
    """The releases so far, and their epsilon."""

    def __init__(
        self,
        accountant: AccountantName = "pld",
        run: str = "",
        earlier: Counts = (),
        *,
        scheme: SamplingScheme | None = None,
    ):
        """Count the releases of `run`. `scheme` composes its steps; if None, each step is a release.

        `earlier` releases were made before the first step.
        """
        require_accountant(accountant)
        for release, _ in earlier:
            require_supported(release, accountant)
        self._scheme = scheme
        self.accountant: AccountantName = accountant
        self.run = run
        """Identity of the current run."""
        self.steps = 0
        """Index of the next step; `releases` also counts repeated steps."""
        self._spans: list[Span] = []
        self._own: list[Span] = []
        self._earlier: Counter[Release] = Counter()  # before any step
        for release, count in earlier:
            self._earlier[release] += count
        self._cost = Counter(self._earlier)  # plus the cost of all spans
        # For a budget (epsilon, delta), a multiset of releases that fits it.
        self._fitting: dict[tuple[float, float], Counter[Release]] = {}

    @property
    def releases(self) -> int:
        """Number of all releases."""
        return sum(span.stop - span.start for span in self._spans)

    @property
    def has_unverified_sampling(self) -> bool:
        """True if the user's script drew the batch of any release."""
        return any(span.unverified_sampling for span in self._spans)

    @property
    def relation(self) -> Relation:
        """Neighbouring relation: "add-or-remove-one", or "replace-special" once a batch was capped."""
        return relation_of(self._cost)

    def record(self, release: Release, *, unverified_sampling: bool = False, follows: bool = True) -> None:
        """Count the release of the next step. Only the code that makes the release calls this.

        `unverified_sampling`: the user's script drew the batch. `follows`: the release continues from the last counted
        one. Raises AccountingError if it cannot be analysed.
        """
        self.charge(self.steps, release, unverified_sampling=unverified_sampling, follows=follows)
        self.steps += 1

    def take_uncharged(self) -> None:
        """Advance by one step, whose release was counted already."""
        self.steps += 1

    def keep(self, step: int, release: Release, *, unverified_sampling: bool, follows: bool = True) -> None:
        """Keep a release of the loaded state that this process has repeated, so that later loads count it."""
        append(self._own, self.run, step, release, unverified_sampling=unverified_sampling, follows=follows)

    def charge(self, step: int, release: Release, *, unverified_sampling: bool = False, follows: bool = True) -> None:
        """Count a release of `step`; see `record`."""
        total = self._cost_with(step, release, unverified_sampling=unverified_sampling, follows=follows)
        for spans in (self._spans, self._own):
            append(spans, self.run, step, release, unverified_sampling=unverified_sampling, follows=follows)
        self._cost = total

    def _cost_with(
        self, step: int, release: Release, *, unverified_sampling: bool, follows: bool = True
    ) -> Counter[Release]:
        require_supported(release, self.accountant)
        if self._scheme is not None:
            more = self._with(step, release, unverified_sampling=unverified_sampling, follows=follows)
            return self._earlier + cost_of(more, self._scheme)
        copies = [span for span in self._spans if span.covers(self.run, step)]
        more = Span(self.run, step, step + 1, release, unverified_sampling)
        return self._cost - cost(copies) + cost([*copies, more])

    def _with(self, step: int, release: Release, *, unverified_sampling: bool, follows: bool) -> list[Span]:
        spans = [*self._spans[:-1], *map(copy, self._spans[-1:])]
        append(spans, self.run, step, release, unverified_sampling=unverified_sampling, follows=follows)
        return spans

    def epsilon(self, delta: float) -> float:
        """Return epsilon at `delta` of all releases so far."""
        return epsilon_of(tuple(self._cost.items()), delta, self.accountant)

    def allows(
        self,
        release: Release,
        *,
        target_epsilon: float,
        target_delta: float,
        plan: Counts = (),
        unverified_sampling: bool = False,
        follows: bool = True,
    ) -> bool:
        """Return True if epsilon stays within `target_epsilon` after `release` of the next step.

        Any part of a multiset that fits the budget fits, too. So most calls only compare counters with `plan`, all
        releases of the run.
        """
        budget = (target_epsilon, target_delta)

        def fits(all_releases: Counter[Release]) -> bool:
            if epsilon_of(tuple(all_releases.items()), target_delta, self.accountant) > target_epsilon:
                return False
            self._fitting[budget] = all_releases
            return True

        if self._scheme is not None:
            spans = self._with(self.steps, release, unverified_sampling=unverified_sampling, follows=follows)
            # With the rest of the plan first, because that result is cached.
            finished = [*spans[:-1], replace(spans[-1], stop=max(spans[-1].stop, self._scheme.steps))]
            return any(fits(self._earlier + cost_of(each, self._scheme)) for each in (finished, spans))
        total = self._cost_with(self.steps, release, unverified_sampling=unverified_sampling)
        if budget in self._fitting and total <= self._fitting[budget]:
            return True
        planned = Counter(dict(plan))
        if total != self._cost + Counter([release]):  # a repeated step
            return fits(total | planned) or fits(total)
        if total[release] <= planned[release] and fits(total | planned):
            return True
        return largest_that_fits(lambda n: fits(self._cost + Counter({release: n})), max(self.releases, 1024)) > 0

    def statement(self, delta: float, *, plan: Counts = (), generator: str = "", rows_per_unit: int = 1) -> str:
        """Return the guarantee in one sentence, with epsilon rounded up. Before any release, `plan` gives the relation.

        `generator` names the source of the noise.
        """
        note = ", a central limit approximation that may under-state epsilon" if self.accountant == "gdp" else ""
        bound = bound_of(tuple(self._cost.items()), delta, self.accountant)
        if bound.accountant != self.accountant:
            note = f", and this figure is the tighter one of {bound.accountant}"
        source = f"; noise: {generator}" if generator else ""
        released = self._cost or [release for release, _ in plan]
        sizes = " or ".join(str(size) for size in sorted({release.sample_size for release in released}))
        unit = "one sample" if rows_per_unit == 1 else f"one unit of up to {rows_per_unit} rows,"
        unit = f"{unit} of N = {sizes}" if sizes else unit
        return (
            f"epsilon = {rounded_up(bound.epsilon)} at delta = {in_figures(delta)} for {unit}, "
            f"{self._sampled(relation_of(released))} (accountant: {self.accountant}{note}{source})"
        )

    def _sampled(self, relation: Relation) -> str:
        fed = sum(span.stop - span.start for span in self._spans if span.unverified_sampling)
        trust = f" ({fed} of them of batches that the script fed, if it drew them so)" if fed else ""
        again = self.releases - self.steps
        repeated = f" ({again} of them of steps that were taken again, or are still to be)" if again else ""
        before = self._earlier.total()
        earlier = f", {before} releases about all samples before them" if before else ""
        groups = max((release.quantile_counts for release in self._cost), default=0)
        counts = f" of a sum and {groups} clipping count{'s' * (groups > 1)}" if groups else ""
        if self._scheme is not None:
            what = self._scheme.in_words(self.releases)
            return f"zero-out neighbours at fixed N, {what}{counts and f', each{counts}'}{repeated}{trust}{earlier}"
        cap = " with a cap" if relation == "replace-special" else ""
        noise = " with discrete Gaussian noise" if any(r.discretized_elements for r in self._cost) else ""
        return (
            f"{relation} neighbours (zero-out at fixed N), {self.releases} releases{counts}{noise}{repeated} under "
            f"Poisson sampling{cap}{trust}{earlier}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON, without the accountant."""
        return {"run": self.run, "steps": self.steps, "spans": [span.state_dict() for span in self._spans]}

    def load_state_dict(self, state: Mapping[str, Any], *, visited: bool = False) -> None:
        """Load a `state_dict()`. Raises CheckpointError, without any change, if it is damaged.

        Releases recorded here stay counted. `visited`: all releases of the state are counted already.
        """
        try:
            run, steps, spans = state["run"], state["steps"], [Span.parse(span) for span in state["spans"]]
            if type(run) is not str or type(steps) is not int or steps < 0:
                raise ValueError(f"run {run!r}, {steps!r} steps")
            if missing := first_missing(spans, run, steps):
                raise ValueError(f"{steps} steps, but no release of step {missing}")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The privacy ledger of the checkpoint is damaged ({error}): spent budget would be forgotten. Resume "
                f"from an older checkpoint."
            ) from error
        self.run, self.steps = run, steps
        if not visited:
            self._spans = [*map(copy, self._own), *spans]
            self._cost = self._earlier + cost_of(self._spans, self._scheme)
