"""The one object that a training script adds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from torch import Tensor, nn

from dpshard import checkpoint
from dpshard.accounting.budget import Budget, with_noise
from dpshard.accounting.mechanism import Mechanism
from dpshard.accounting.releases import Counts
from dpshard.backends import choose
from dpshard.checkpoint.facts import FactsOfRun
from dpshard.clipping.functions import ClippingFunction, parse_clipping_fn
from dpshard.clipping.groups import ClippingGroup
from dpshard.clipping.metrics import BatchMetrics
from dpshard.clipping.thresholds import QuantileTracking, Thresholds, TrackedThresholds, require_tracking
from dpshard.config import (
    AccountantName,
    BatchSchedule,
    BatchSize,
    ClippingStyle,
    Execution,
    LossReduction,
    NoiseName,
    OffloadRecords,
    SamplingName,
    parse_clipping_mode,
    require_choices,
)
from dpshard.errors import CheckpointError, EngineInUseError
from dpshard.interception import Interception, Run
from dpshard.noise.correlation import BandedInverse, BandMF
from dpshard.noise.keyed import generator_name
from dpshard.randomness import derive_key, new_run_secret
from dpshard.rules.call import Source
from dpshard.sampling import (
    PackedTokens,
    Packing,
    parse_cap,
    require_feed,
    require_packing,
)
from dpshard.step import optimizer_hook
from dpshard.step.collector import Collector
from dpshard.step.internals import Internals
from dpshard.step.logical_batch import LogicalBatch
from dpshard.step.noise_of_run import NoiseOfRun, StepNoise
from dpshard.step.samples_of_run import SamplesOfRun
from dpshard.verification import Verifier, loss_on, verified_collation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class PrivacyEngine:
    """Makes the training of `model` differentially private: clips each sample's gradient, adds noise, counts epsilon.

    Any optimizer gets (sum_i C_i g_i + noise) / batch_size, one logical batch per step. g_i is the gradient of sample
    i's own loss, C_i its clip coefficient. By default, the noise has standard deviation noise_multiplier *
    max_grad_norm. `gradient_noise_std` is the actual standard deviation, after the division.

    Args:
        model: The module to train. Wrap it (torch.compile, checkpointing) and freeze parameters before.
        batch_size: Expected logical batch: an int, phases `[(batch_size, steps), ...]`, or a callable of the step.
        sample_size: Number of samples of the data set.
        epochs: Length of the run: round(epochs * sample_size / batch_size) steps. Or give `steps`.
        steps: Length of the run in optimizer steps.
        target_epsilon: Budget of the run; calibrates the noise. Or give `noise_multiplier`.
        target_delta: Delta of the guarantee; well below 1 / sample_size.
        noise_multiplier: Standard deviation of the noise over the sensitivity; 0 means no privacy.
        max_grad_norm: Largest L2 norm of a sample's contribution, over all parameters.
        clipping_fn: "automatic" C = R / (|g| + 0.01), "abadi" C = min(1, R / |g|), "global" C = 1 if |g| <= R else 0;
            or a ClippingFunction.
        clipping_style: Parameters that share a norm: "all-layer", "layer-wise", "block-wise", "param-wise", or lists of
            names. Each of M groups has the threshold max_grad_norm / sqrt(M).
        clipping_mode: Method for norms. It changes time and memory, never the result (docs/guide.md).
        accountant: "pld" (tightest), "rdp", or "gdp" (may under-state epsilon).
        loss_reduction: "mean" or "sum" over the rows of the micro-batch.
        rows_per_unit: Adjacent rows K of a unit (a patient, a user, a pair); all sizes count units. A unit's gradient
            is that of the mean of its rows' losses. A loss may couple rows of one unit, never of two.
        adaptive_clipping: A `QuantileTracking`: thresholds and noise follow the gradient norms, from `max_grad_norm`
            on. Needs `engine.batches`.
        max_batch_size: Cap of the logical batch (truncated Poisson); "auto" is B + 6 sqrt(B).
        offload_records: Records wait for the norms in host memory: less GPU memory, more time. True for all, "auto" for
            those that do not fit, or the GiB that stay on the GPU. Needs a mode with one backward pass.
        secure_mode: Draw the noise on the CPU as sums of four normals in float64, so that last bits reveal nothing.
        noise: "gaussian", or "discrete-gaussian": exact integers on a grid. The latter needs accountant="rdp", no cap
            and fixed thresholds (docs/threat-model.md).
        sampling: "poisson": each sample by a coin. "balls-in-bins": once an epoch, in a random step. "fixed-order":
            once an epoch, in one order, also from a stream or your own loop. "cyclic-poisson": groups take turns, with
            BandMF. All but "poisson" need an int as batch_size; the last two need fixed thresholds.
        noise_correlation: A `BandedInverse` or `BandMF`: noise that partly cancels over the steps. Needs fixed
            thresholds and a sampling other than "poisson".
        verify: Compare samples with plain autograd at the first micro-batch, at steps 1, 2, 4, ..., and after a change.
        on_budget: "raise" BudgetExceededError before a step that would exceed target_epsilon, or "continue" with a
            warning.
        earlier: Earlier releases about the same samples, `((Release, count), ...)`, which epsilon and calibration
            include.
        model_parallel_group: Ranks with parts of this model or of its samples, unless DTensors show it. A group of only
            this rank means that other ranks train other models.
        model_parallel_parts: What each rank of a larger group holds, by patterns of parameter names; the first match
            counts. A number: a part along this dimension. "same": the parameter and its whole gradient. "sum": the
            parameter and a term of its gradient. "samples": the parameter, beside experts in parts along dimension 0;
            each rank has its own samples. "stage": a parameter of a pipeline's stage. See docs/model-parallel.md.

    Raises:
        ConfigurationError: for settings out of range or in contradiction.
        EngineInUseError: if a parameter already belongs to an engine.
        AccountingError: if the accountant cannot analyse the mechanism.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_size: BatchSize,
        sample_size: int,
        epochs: float | None = None,
        steps: int | None = None,
        target_epsilon: float | None = None,
        target_delta: float = 1e-5,
        noise_multiplier: float | None = None,
        max_grad_norm: float = 1.0,
        clipping_fn: str | ClippingFunction = "automatic",
        clipping_style: ClippingStyle | Sequence[Sequence[str]] = "all-layer",
        clipping_mode: str = "auto",
        accountant: AccountantName = "pld",
        loss_reduction: LossReduction = "mean",
        rows_per_unit: int = 1,
        adaptive_clipping: QuantileTracking | None = None,
        max_batch_size: int | Literal["auto"] | None = None,
        offload_records: OffloadRecords = False,
        secure_mode: bool = False,
        noise: NoiseName = "gaussian",
        sampling: SamplingName = "poisson",
        noise_correlation: BandedInverse | BandMF | None = None,
        verify: bool = True,
        on_budget: Literal["raise", "continue"] = "raise",
        earlier: Counts = (),
        model_parallel_group: ProcessGroup | None = None,
        model_parallel_parts: Mapping[str, int | Literal["same", "sum", "samples", "stage"]] | None = None,
    ) -> None:
        _require_arguments(model, accountant, loss_reduction, on_budget, secure_mode, noise, verify)
        require_tracking(adaptive_clipping, max_grad_norm, noise)
        plan = BatchSchedule.parse(batch_size, sample_size=sample_size, epochs=epochs, steps=steps, sampling=sampling)
        execution = parse_clipping_mode(clipping_mode, offload_records=offload_records)
        function = parse_clipping_fn(clipping_fn)
        asked = partial(Mechanism, sampling=sampling, noise_correlation=noise_correlation, earlier=earlier)
        asked = partial(asked, accountant=accountant, target_delta=target_delta, target_epsilon=target_epsilon)
        asked = partial(asked, secure=secure_mode, loss_reduction=loss_reduction, rows_per_unit=rows_per_unit)
        self._backend = backend = choose(model, model_parallel_group, model_parallel_parts)
        with ExitStack() as undo:
            undo.callback(backend.detach)
            backend.sharding.require_trainable(clipping_mode, backward_passes=execution.backward_passes)
            groups = backend.partition(clipping_style, max_grad_norm)
            mechanism = asked(
                schedule=plan,
                sample_size=sample_size,
                max_batch_size=parse_cap(max_batch_size, plan),
                quantile_counts=0 if adaptive_clipping is None else len(groups),
                discretized_elements=None if noise == "gaussian" else backend.sharding.elements,
                max_grad_norm=float(max_grad_norm),
                clipping_fn=repr(function),
                clipping_groups=tuple(group.names for group in groups),
                adaptive_clipping=None if adaptive_clipping is None else repr(adaptive_clipping),
            )
            self.mechanism = with_noise(mechanism, noise_multiplier)
            self._begin(verify=verify, clipping_mode=clipping_mode, allow_overspend=on_budget == "continue")
            self._watch(groups, function, execution, adaptive_clipping, undo)
            undo.pop_all()

    def _begin(self, *, verify: bool, clipping_mode: str, allow_overspend: bool) -> None:
        self.model, self._verify = self._backend.sharding.outermost, verify
        facts = {field.name: getattr(self.mechanism, field.name) for field in fields(self.mechanism)}
        # Optimised coefficients may depend on the version of scipy, and the noise depends on them.
        facts["coefficients"] = self.mechanism.correlation.coefficients
        choices = {"clipping_mode": clipping_mode, "verify": verify, "may_exceed_budget": allow_overspend}
        self._backend.require_agreement(facts | choices)
        self._secret = self._backend.communicator.broadcast(new_run_secret())
        run = derive_key(self._secret, "run")[:8].hex()
        self._budget = Budget(self.mechanism, allow_overspend=allow_overspend, run=run)
        self._noise = NoiseOfRun(self.mechanism)
        self._samples = SamplesOfRun(self.mechanism, self._backend.data_ranks)
        self._facts = FactsOfRun(self._backend, clipping_mode, self.mechanism.sampling)
        self._metrics = BatchMetrics()  # of the last logical batch
        self._gradient_noise_std = 0.0
        self._sqrt_elements = math.sqrt(self._backend.sharding.elements)

    def _watch(
        self,
        groups: tuple[ClippingGroup, ...],
        function: ClippingFunction,
        execution: Execution,
        adaptive: QuantileTracking | None,
        undo: ExitStack,
    ) -> None:
        mean, K = self.mechanism.loss_reduction == "mean", self.mechanism.rows_per_unit
        collector = Collector(
            self._backend, groups, function, execution, mean=mean, rows_per_unit=K, fed=self._samples.fed
        )
        self._collector, self._clipper = collector, collector.clipper
        sharding, clipper = self._backend.sharding, collector.clipper
        self.internals = Internals(self._backend, collector, self._budget.ledger)
        self._thresholds = Thresholds(clipper) if adaptive is None else TrackedThresholds(clipper, adaptive)
        ranks, secret = self._backend.communicator, lambda: self._secret
        moved = self.mechanism.sampling == "poisson" and self.mechanism.max_batch_size is None
        moment, data_ranks = lambda: (self.step, *collector.moment), self._backend.data_ranks
        self._verifier = Verifier(sharding, data_ranks, clipper, moment, secret, mean=mean, moved=moved)
        sources: dict[Tensor, Source] = {p: clipper.sources[name] for name, p in sharding.parameters.items()}
        alone, before = ranks.world_size == 1, self._before_forward
        self._interception = Interception(
            self.model, sources, collector, sharding, before, K, verified=self._verify, alone=alone
        )
        undo.callback(self._interception.patcher.uninstall)
        self._interception.install()
        optimizer_hook.register(self)

    # --- what a training script uses --------------------------------------------------------------------------------

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise over the sensitivity (sigma)."""
        return self.mechanism.noise_multiplier

    @property
    def gradient_noise_std(self) -> float:
        """Standard deviation of the noise in the last private gradient; 0 before the first."""
        return self._gradient_noise_std

    @property
    def steps(self) -> int:
        """Steps of the planned run."""
        return self.mechanism.schedule.steps

    @property
    def step(self) -> int:
        """Index of the next step: the number of released steps."""
        return self._budget.ledger.steps

    @property
    def thresholds(self) -> dict[str, float]:
        """Threshold R_m of each clipping group in the next step, by label; epsilon covers adaptive ones."""
        return {group.label: group.threshold for group in self._clipper.groups}

    def epsilon(self, delta: float | None = None) -> float:
        """Return epsilon spent so far, at `delta` (default: target_delta)."""
        return self._budget.ledger.epsilon(self.mechanism.target_delta if delta is None else delta)

    def statement(self) -> str:
        """Return the guarantee reached so far, in one sentence."""
        mechanism, device = self.mechanism, self._backend.sharding.device
        return self._budget.statement(generator_name(device, mechanism.noise, secure=mechanism.secure))

    def metrics(self) -> dict[str, float]:
        """Return figures of the last logical batch, over all ranks. NOT private: epsilon does not cover them.

        Keys: loss (after `record_loss`), realised_batch_size, nonfinite_samples (dropped), clip_fraction,
        clipped_sum_norm, grad_norm/GROUP (mean), grad_norm_max/GROUP, gradient_snr. The last is |clipped sum| over the
        expected norm of the noise (Anil et al. 2021, Sec. 5.2.1).
        """
        return self._metrics.summary()

    def record_loss(self, loss: Tensor) -> None:
        """Record the loss of a micro-batch for `metrics()`: [B], one per row or unit, or [], their mean."""
        plan = self._collector.plan
        is_padding_B = None
        if plan is not None:
            of_units = loss.dim() > 0 and len(loss) == len(plan.is_padding)
            is_padding_B = plan.is_padding_on(loss.device, 1 if of_units else plan.rows_per_unit)
        self._collector.metrics.add_loss(loss.detach(), is_padding_B)

    def batches(
        self,
        dataset: Any,
        micro_batch_size: int | None,
        *,
        steps: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        pad: bool = True,
        packing: Packing | None = None,
    ) -> Iterator[LogicalBatch]:
        """Yield the remaining logical batches of the run, sampled from `dataset`, from `engine.step` on.

        Each is an iterable of micro-batches of `micro_batch_size` samples (None: a single micro-batch); padding
        contributes exactly 0. Call `optimizer.step()` after each, also after an empty one. Loops that sort, shuffle or
        augment rows need `pad=False`: smaller last micro-batches, or one padding row if none was drawn. `packing` packs
        documents into rows; `micro_batch_size` is then the largest number of documents. `steps` requests another number
        of logical batches. A step beyond the budget raises BudgetExceededError, or warns with on_budget="continue".
        DataLoader defines the other arguments.

        All ranks begin together, with the same whole data set in one order. Raises DataError if known rows differ, and
        for a data set that is empty, not map-style, or not of `sample_size`. With sampling="fixed-order",
        `dataset` may be an IterableDataset. Each epoch yields the same `sample_size` different samples in one order.
        num_workers is then at most 1.
        """
        K = self.mechanism.rows_per_unit
        require_feed(micro_batch_size, steps, pad=pad, rows_per_unit=K)
        plain = {"verify": self._verify, "pad": pad, "collate_fn": collate_fn is None, "rows_per_unit": K == 1}
        require_packing(packing, micro_batch_size, self.mechanism.sample_size, plain)
        collate_fn = verified_collation(collate_fn, K) if self._verify else collate_fn
        reading: Any = {"collate_fn": collate_fn, "worker_init_fn": worker_init_fn, "pin_memory": pin_memory}
        reading |= {"num_workers": num_workers, "prefetch_factor": prefetch_factor}
        begin = partial(self._begin_batches, dataset, micro_batch_size, steps)
        loaded = self._samples.load(dataset, begin, micro_batch_size, pad=pad, packing=packing, **reading)
        return self._collector.batches(loaded, lambda: self.step)

    def _begin_batches(self, dataset: Any, micro_batch_size: int | None, steps: int | None) -> tuple[bytes, range]:
        # At the first batch, because load_state_dict() may come before.
        released = self._budget.ledger.releases > 0
        self._facts.begin_batches(dataset, micro_batch_size, self._secret, self.step, released=released)
        return self._secret, range(self.step, self.steps if steps is None else self.step + steps)

    def packed(self, unit_ids: Tensor, units: int) -> AbstractContextManager[None]:
        """Return a context in which your own loop feeds packed rows [R, T]; forwards and `verify` belong in it.

        `unit_ids` [R, T] or [T]: the unit of every token, 0, 1, ..., and -1 for padding; see `dpshard.packed_unit_ids`.
        `units`: the largest number of units in a micro-batch, public; the divisor of a mean loss. Raises
        BatchLayoutError for a unit that is not one run of tokens in one row.
        """
        return self._collector.own_packed(PackedTokens(unit_ids, units), verified=self._verify)

    def privatize(self) -> None:
        """Add the noise to the clipped sums and divide by the expected batch size; no effect on private gradients.

        `optimizer.step()` calls it; call it first to read private gradients. Raises LogicalBatchError on a
        half-finished logical batch, or after a release that failed; BudgetExceededError if the budget is spent.
        """
        collector, backend = self._collector, self._backend
        if not collector.begin_release(self.step):
            return
        if self._verify:
            self._verifier.before_release()
        own = collector.batch is None
        if own:
            self._thresholds.refuse_own_loop()
        self._samples.begin_release(self.step, own=own)
        step, mechanism = self.step, self.mechanism
        sigma, batch_size = mechanism.noise_multiplier, mechanism.schedule[step]
        z_std = self._thresholds.gradient_noise(sigma) * mechanism.sensitivity
        # All sums that get noise, and its scale: see [Note: Equal sums, equal noise].
        digest = collector.complete_sums(self._noise.digest(self._secret).part)
        sums = (step, *digest, z_std.hex(), *self._thresholds.counts(collector))
        of_step = self._noise.of_step(self._secret, step, sums)
        noise, std = of_step.noise, z_std * of_step.scale
        with collector.releasing(lambda: self.step != step):
            # Counted first: an error after this line can only over-state what was spent.
            on_disk = self._spend(of_step, own=own)
            signal_norm = backend.gradients.privatize(
                lambda shards: noise.release_(shards, step=step, std=z_std, divisor=batch_size)
            )
            collector.metrics.observe_sum(signal_norm, std * self._sqrt_elements)
            self._gradient_noise_std = std / batch_size
            self._metrics = collector.end_release()
        self._thresholds.move(self._metrics, noise, step=step, sigma=sigma, batch_size=batch_size)
        self._interception.forget()
        collector.warn_of_unreached()
        try:
            for wait in on_disk:
                wait()
        except BaseException:
            backend.gradients.drop()  # a crash would forget this release
            raise

    def _spend(self, of_step: StepNoise, *, own: bool) -> list[Callable[[], object]]:
        step = self.step
        counts = self._budget.spend(of_step.identity, unverified_sampling=own)
        self._noise.take(of_step)
        self._samples.end_release(step, own=own)
        return self.internals.note(step, of_step.identity) if counts else []

    def verify(
        self,
        *model_inputs: Any,
        loss_fn: Callable[..., Tensor] | None = None,
        targets: Any = (),
        **model_kwargs: Any,
    ) -> None:
        """Check, on a few rows of `model_inputs`, that every sample has its own, correct gradient; all ranks call it.

        Differentiates `loss_fn(output, *targets)`, else the model's loss, else a random direction of its output.
        Targets are tensors with a row per sample. Restores RNG state, buffers and gradients. Raises VerificationError.
        """
        targets = (targets,) if isinstance(targets, Tensor) else tuple(targets)
        with self._backend.sharding.guard_disabled():
            run = self._interception.plan(model_inputs, model_kwargs)
            loss = None if loss_fn is None else loss_on(run, loss_fn, targets)
            self._verifier.verify(self._interception.replay, run, loss, thorough=True)

    def detach(self) -> None:
        """Restore the ordinary model; drop clipped sums that were not privatized."""
        self._collector.close()
        self._interception.patcher.uninstall()
        self._backend.detach()
        optimizer_hook.unregister(self)

    def state_dict(self) -> dict[str, Any]:
        """Return ledger, step, run secret and mechanism, as plain values. They are as secret as the data."""
        return checkpoint.pack(
            self.mechanism,
            self._secret,
            self._budget.state_dict(),
            facts=self._facts.state_dict(),
            thresholds=self._thresholds.state_dict(),
            noise=self._noise.state_dict(),
            order=self._samples.state_dict(),
        )

    def load_state_dict(
        self, state: dict[str, Any], *, released: int | Sequence[tuple[int, bytes]] | None = None
    ) -> None:
        """Continue the run that saved `state`, with the same batches; releases of this engine stay counted.

        A repeated step with the same sums costs nothing; with other sums it is charged.

        Args:
            state: A `state_dict()`, the same on all ranks.
            released: Steps released in all before the crash, if more than in the state; repetitions are charged. A
                Checkpointer passes its journal instead.

        Raises CheckpointError, and changes nothing, if `state` is damaged, of another mechanism, or differs between
        ranks. Raises LogicalBatchError in the middle of a logical batch.
        """
        self._collector.require_rest()
        unpacked = checkpoint.unpack(state, self.mechanism)
        secret, account, saved_facts, thresholds, noise, order = unpacked
        checkpoint.require_released(released, account)
        loaded = unpacked._asdict() | {"released": released, "facts": None}
        if self._backend.communicator.mismatches(loaded):
            raise CheckpointError(
                "Ranks loaded different states, so they would draw different batches, repeat different steps, and "
                "count differently. Load one state, saved by one rank, on all of them."
            )
        Budget(self.mechanism, allow_overspend=True).load_state_dict(account)  # raises before any change
        before, same_run = self.step, secret == self._secret
        self._samples.require_saved_order(order, account["ledger"]["steps"])
        self._noise.load_state_dict(noise, account["ledger"]["steps"])
        self._thresholds.load_state_dict(thresholds)
        self._samples.load_state_dict(order)
        visited = self._budget.load_state_dict(account)
        self._secret = secret
        self._collector.begin_anew()
        self._facts.know_data(saved_facts, secret)
        if released is not None:
            self._facts.forget()
            self._budget.count_released(released)
        elif not visited:
            self._facts.load_state_dict(saved_facts, self.step, before=before if same_run else 0)
        elif self.step < before:
            warnings.warn(
                f"load_state_dict() goes back from step {before} to step {self.step}. Releases stay counted. A "
                f"repeated step with the same sums costs nothing; with other sums it is charged.",
                stacklevel=2,
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copies and pickles: a copy would draw the same noise."""
        raise EngineInUseError(
            "A PrivacyEngine cannot be copied or pickled: two of them would draw the same noise. Copy the model only "
            "(the copy is an ordinary one) and make an engine for it, or save and load state_dict()."
        )

    # --- callbacks of interception and verification --------------------------------------------------------------

    def _before_forward(self, run: Run, kind: Any) -> None:
        if self._verify:
            self._verifier.before_forward(self._interception.replay, run, kind)


def _require_arguments(model: Any, *choices: Any) -> None:
    optimizer_hook.require_model(model)
    require_choices(*choices)
