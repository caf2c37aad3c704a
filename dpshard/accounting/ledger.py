"""The ledger of a run: its releases, their epsilon, and the check of a further release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dpshard.accounting.bounds import bound_of, check_accountant, check_supported, epsilon_of
from dpshard.accounting.calibration import largest_that_fits
from dpshard.accounting.releases import Counts, Relation, Release, relation_of, rounded_up
from dpshard.config import AccountantName, is_count
from dpshard.errors import CheckpointError


class PrivacyLedger:
    """The releases so far, and their epsilon."""

    def __init__(self, accountant: AccountantName = "pld"):
        check_accountant(accountant)
        self.accountant: AccountantName = accountant
        self.steps = 0
        """Index of the next step; `releases` is larger after repeated steps."""
        self._counts: Counter[Release] = Counter()
        self._unverified_sampling = 0  # releases of batches drawn by the script itself
        self._own: Counter[Release] = Counter()  # releases recorded here, not loaded
        self._own_unverified_sampling = 0
        # By budget (epsilon, delta): further releases that fit it all together.
        self._allowances: dict[tuple[float, float], Counter[Release]] = {}

    @property
    def releases(self) -> int:
        """Number of all releases."""
        return self._counts.total()

    @property
    def relation(self) -> Relation:
        """Neighbouring relation: "add-or-remove-one", or "replace-special" once a batch was capped."""
        return relation_of(self._counts)

    def record(self, release: Release, *, unverified_sampling: bool = False) -> None:
        """Count the release of the next step; only the code that makes it calls this.

        `unverified_sampling`: the script drew the batch itself. Raises AccountingError if the release cannot be
        analysed.
        """
        self.charge(release, unverified_sampling=unverified_sampling)
        self.steps += 1

    def repeat(self) -> None:
        """Take the next step without a count: the same release was counted already."""
        self.steps += 1

    def charge(self, release: Release, *, unverified_sampling: bool = False) -> None:
        """Count a release of any step; see `record`."""
        check_supported(release, self.accountant)
        self._counts[release] += 1
        self._own[release] += 1
        self._unverified_sampling += unverified_sampling
        self._own_unverified_sampling += unverified_sampling
        for budget, allowance in list(self._allowances.items()):
            allowance[release] -= 1
            if allowance[release] < 0:
                del self._allowances[budget]

    def epsilon(self, delta: float) -> float:
        """Return epsilon at `delta` of all releases so far."""
        return epsilon_of(tuple(self._counts.items()), delta, self.accountant)

    def allows(self, release: Release, *, target_epsilon: float, target_delta: float, plan: Counts = ()) -> bool:
        """Return True if epsilon stays within `target_epsilon` after one more `release`.

        If n further releases fit the budget, any subset fits too: until then, calls look up a counter. The rest of
        `plan`, the releases of the whole run, is tried first, with one evaluation of epsilon. Otherwise bisection finds
        how many such releases fit, in about log2(steps) evaluations.
        """
        check_supported(release, self.accountant)
        budget = (target_epsilon, target_delta)
        if budget in self._allowances and self._allowances[budget][release] > 0:
            return True

        def fits(more: Counter[Release]) -> bool:
            if epsilon_of(tuple((self._counts + more).items()), target_delta, self.accountant) > target_epsilon:
                return False
            self._allowances[budget] = more
            return True

        rest = Counter(dict(plan)) - self._counts
        if rest[release] > 0 and fits(rest):
            return True
        return largest_that_fits(lambda n: fits(Counter({release: n})), max(self.releases, 1024)) > 0

    def statement(self, delta: float, *, plan: Counts = (), generator: str = "", rows_per_unit: int = 1) -> str:
        """Return the guarantee in one sentence, epsilon rounded up; before any release, `plan` gives the relation.

        `generator` names the source of the noise.
        """
        note = ", a central limit approximation that may under-state epsilon" if self.accountant == "gdp" else ""
        bound = bound_of(tuple(self._counts.items()), delta, self.accountant)
        if bound.accountant != self.accountant:
            note = f", and this figure is the tighter one of {bound.accountant}"
        source = f"; noise: {generator}" if generator else ""
        released = self._counts or [release for release, _ in plan]
        relation = relation_of(released)
        sizes = " or ".join(str(size) for size in sorted({release.sample_size for release in released}))
        unit = "one sample" if rows_per_unit == 1 else f"one unit of up to {rows_per_unit} rows,"
        unit = f"{unit} of N = {sizes}" if sizes else unit
        cap = " with a cap" if relation == "replace-special" else ""
        groups = max((release.quantile_counts for release in self._counts), default=0)
        counts = f" of a sum and {groups} clipping count{'s' * (groups > 1)}" if groups else ""
        noise = " with discrete Gaussian noise" if any(r.discretized_elements for r in self._counts) else ""
        trust = (
            f" ({self._unverified_sampling} of them of batches that the script fed, if it drew them so)"
            if self._unverified_sampling
            else ""
        )
        again = self.releases - self.steps
        repeated = f" ({again} of them of steps that were taken again, or are still to be)" if again else ""
        releases = f"{self.releases} releases{counts}{noise}{repeated}"
        return (
            f"epsilon = {rounded_up(bound.epsilon)} at delta = {delta:g} for {unit}, {relation} "
            f"neighbours (zero-out at fixed N), {releases} under Poisson sampling{cap}{trust} "
            f"(accountant: {self.accountant}{note}{source})"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the content as plain JSON, without the accountant."""
        releases = [asdict(r) | {"count": n} for r, n in self._counts.items()]
        again = self.releases - self.steps
        return {
            "steps": self.steps,
            "again": again,
            "unverified_sampling": self._unverified_sampling,
            "releases": releases,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, visited: bool = False) -> None:
        """Go to the step of a `state_dict()`. Raises CheckpointError, without any change, if it is damaged.

        Releases recorded here stay counted, in addition to those of the state. `visited`: this ledger was in that
        state before, so all releases of the state are counted already.
        """
        try:
            counts: Counter[Release] = Counter()
            for entry in state["releases"]:
                fields = dict(entry)
                count = fields.pop("count")
                if not is_count(count):
                    raise ValueError(f"a release has the count {count!r}")
                counts[Release(**fields)] += count
            steps, again, unverified_sampling = state["steps"], state["again"], state["unverified_sampling"]
            if not all(type(n) is int and n >= 0 for n in (steps, again)) or counts.total() != steps + again:
                raise ValueError(f"{counts.total()} releases, but {steps!r} steps, and {again!r} again")
            if not (type(unverified_sampling) is int and 0 <= unverified_sampling <= counts.total()):
                raise ValueError(f"{unverified_sampling!r} releases with unverified sampling")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The privacy ledger of the checkpoint is damaged ({error}): spent budget would be forgotten. Resume "
                f"from an older checkpoint."
            ) from error
        self.steps = steps
        if not visited:
            self._counts, self._unverified_sampling = (
                counts + self._own,
                unverified_sampling + self._own_unverified_sampling,
            )
        self._allowances.clear()
