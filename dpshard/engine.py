"""PrivacyEngine: the one object that a training script adds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args
from weakref import WeakSet

from torch import Tensor, nn

from dpshard import checkpoint, optimizers
from dpshard.backends import choose
from dpshard.budget import Budget, noise_multiplier_for
from dpshard.clipping import ClippingFunction, ClippingGroup, parse_clipping_fn
from dpshard.config import (
    AccountantName,
    BatchSchedule,
    BatchSize,
    ClippingStyle,
    LossReduction,
    Mechanism,
    check_choice,
    check_positive,
    is_count,
    parse_clipping_mode,
    warn_of_low_cap,
)
from dpshard.errors import CheckpointError, ConfigurationError, EngineInUseError, LogicalBatchError
from dpshard.grouping import partition
from dpshard.interception import Interception, Run, plan_run
from dpshard.logical_batch import Loaded, LogicalBatch, LotState
from dpshard.metrics import BatchMetrics
from dpshard.nodes import accumulates
from dpshard.noise import KeyedGaussian
from dpshard.randomness import derive_key, new_run_secret
from dpshard.rules.call import Source
from dpshard.sampling import (
    MicroBatchPlan,
    PoissonSampler,
    check_micro_batch_size,
    default_cap,
    load,
    plan_micro_batches,
)
from dpshard.tape import Clipper, Take, Tape
from dpshard.verify import Loss, compare

if TYPE_CHECKING:
    from dpshard.backends.training_state import TrainingState


class PrivacyEngine:
    """Makes the training of `model` differentially private: clips every sample's gradient, adds noise, keeps account.

    Between two optimizer steps lies one logical batch. The optimizer, any, sees the gradient
    (sum_i C_i g_i + noise) / batch_size, where g_i is the gradient of sample i's own loss, C_i its clipping factor,
    and the noise has standard deviation noise_multiplier * max_grad_norm.

    Args:
        model: The module to train. Wrap it (torch.compile, checkpointing) before; freeze parameters before, too.
        batch_size: Expected logical batch size: an int, phases `[(batch_size, steps), ...]`, or a callable of the step.
        sample_size: Number of samples of the data set.
        epochs: Length of the run: round(epochs * sample_size / batch_size) steps. Or give `steps`.
        steps: Length of the run in optimizer steps.
        target_epsilon: Budget: the noise is calibrated so that the whole run spends at most this. Or give
            `noise_multiplier`.
        target_delta: Delta of the guarantee; well below 1 / sample_size.
        noise_multiplier: Standard deviation of the noise over the sensitivity; 0 means no privacy at all.
        max_grad_norm: L2 norm that one sample contributes at most, over all parameters.
        clipping_fn: "automatic" C = R / (|g| + 0.01), "abadi" C = min(1, R / |g|), "global" C = 1 if |g| <= R else 0;
            or a ClippingFunction.
        clipping_style: Which parameters share a norm: "all-layer", "layer-wise", "block-wise", "param-wise", or lists
            of parameter names. M groups have the threshold max_grad_norm / sqrt(M) each.
        clipping_mode: How norms are computed: time and memory, never the result. See docs/guide.md.
        accountant: "pld" (tightest), "rdp", or "gdp" (an approximation that may under-state epsilon).
        loss_reduction: What the loss does over the rows of the micro-batch: "mean" or "sum".
        max_batch_size: Cap of the logical batch (truncated Poisson), "auto" for B + 6 sqrt(B), None for no cap.
        offload_records: With one backward pass, keep what waits for the norms in the memory of the host rather than of
            the GPU: all-layer clipping of models whose records do not fit, at the price of the traffic.
        secure_mode: Draw noise and batches from a cryptographic generator.
        verify: Compare a few samples of the first micro-batch with plain autograd before training on it.
        on_budget: "raise" BudgetExceededError before a step that would pass target_epsilon, or "continue" with a
            warning.

    Raises:
        ConfigurationError: for settings out of range or in contradiction.
        EngineInUseError: if a parameter of the model already belongs to an engine.
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
        max_batch_size: int | Literal["auto"] | None = None,
        offload_records: bool = False,
        secure_mode: bool = False,
        verify: bool = True,
        on_budget: Literal["raise", "continue"] = "raise",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigurationError(
                f"model is of type {type(model).__name__}, no torch.nn.Module: pass the module that is trained."
            )
        check_choice("accountant", accountant, get_args(AccountantName))
        check_choice("loss_reduction", loss_reduction, get_args(LossReduction))
        check_choice("on_budget", on_budget, ("raise", "continue"))
        check_choice("secure_mode", secure_mode, (False, True))
        check_choice("verify", verify, (False, True))
        check_positive("max_grad_norm", max_grad_norm)
        schedule = BatchSchedule.parse(batch_size, sample_size=sample_size, epochs=epochs, steps=steps)
        execution = parse_clipping_mode(clipping_mode)
        if offload_records and execution.backward_passes == 2:
            raise ConfigurationError(
                f"offload_records: clipping_mode={clipping_mode!r} takes two backward passes and keeps no records. "
                f"Choose one of one pass (auto, bk, bk-mixed-ghost, bk-mixed-opt, per-example), or leave it out."
            )
        execution = replace(execution, offload_records=bool(offload_records))
        function = parse_clipping_fn(clipping_fn)

        optimizers.refuse_shared(model)
        self._backend = choose(model)
        self.model = model = self._backend.outermost
        if not self._backend.parameters:
            raise ConfigurationError(
                f"{type(model).__name__} has no trainable parameter, so there is nothing to privatize. Set "
                f"requires_grad_(True) on what shall be trained before making the engine."
            )
        try:
            if execution.backward_passes == 2 and not self._backend.two_passes:
                raise ConfigurationError(
                    f"clipping_mode={clipping_mode!r} goes through the model twice in backward, but what shards it "
                    f'frees its parameters after the first time. Choose a mode of one pass: "auto", "bk", '
                    f'"bk-mixed-ghost", "bk-mixed-opt", "per-example".'
                )
            groups = partition(self._backend.core, clipping_style, list(self._backend.parameters), max_grad_norm)
            cap = default_cap(max(schedule.sizes)) if max_batch_size == "auto" else max_batch_size
            warn_of_low_cap(cap, schedule)
            sigma = noise_multiplier_for(
                noise_multiplier, target_epsilon, target_delta, schedule, sample_size, cap, accountant
            )
        except Exception:
            self._backend.detach()
            raise
        self.mechanism = Mechanism(
            noise_multiplier=sigma,
            max_grad_norm=float(max_grad_norm),
            clipping_fn=repr(function),
            clipping_groups=tuple(group.names for group in groups),
            sample_size=sample_size,
            schedule=schedule,
            max_batch_size=cap,
            loss_reduction=loss_reduction,
            secure=secure_mode,
            accountant=accountant,
            target_delta=target_delta,
            target_epsilon=target_epsilon,
        )
        self._mean = loss_reduction == "mean"
        self._verify = verify
        self._secret = self._backend.share(new_run_secret())
        self._budget = Budget(self.mechanism, may_exceed=on_budget == "continue")
        self._state = LotState.EMPTY
        self._lot: LogicalBatch | None = None
        self._tapes: WeakSet[Tape] = WeakSet()  # a graph that is still to be differentiated keeps its own alive
        self._nonce = self._backend.share(new_run_secret())  # of noise for batches that the user's own loop feeds
        self._loads = 0  # states loaded so far: batches drawn before one belong to another run
        self._own_loop_warned = False
        self._metrics, self._last_metrics = BatchMetrics(), BatchMetrics()
        self._labels = [group.label for group in groups]
        self._clipper = Clipper(
            self._backend.shapes,
            groups,
            function,
            execution,
            self._deliver,
            self._observe,
            self._backend.anchored,
            self._backend.values,
        )
        self.two_passes = execution.backward_passes == 2
        sources: dict[Tensor, Source] = {p: self._clipper.sources[name] for name, p in self._backend.parameters.items()}
        self._interception = Interception(model, sources, self, self._backend)
        try:
            self._require_agreement(clipping_mode)
            self._interception.install()
        except Exception:
            self._interception.uninstall()
            self._backend.detach()
            raise
        optimizers.register(self)

    def _require_agreement(self, clipping_mode: str) -> None:
        """Ranks that disagree would draw other batches, or shards of other noise, than the one that tells epsilon."""
        backend = self._backend
        facts: dict[str, Any] = {field.name: getattr(self.mechanism, field.name) for field in fields(self.mechanism)}
        facts |= {"clipping_mode": clipping_mode, "verify": self._verify, "may_exceed_budget": self._budget.may_exceed}
        facts["parameters"] = [(n, tuple(backend.shapes[n]), p.dtype) for n, p in backend.parameters.items()]
        if differing := backend.differing(facts):
            raise ConfigurationError(
                f"Ranks disagree about {', '.join(differing)}. Every rank makes the same engine for the same model; "
                f"sample_size counts the whole data set, of which engine.batches(...) gives every rank its share."
            )

    # --- what a training script uses --------------------------------------------------------------------------------

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise over the sensitivity (sigma)."""
        return self.mechanism.noise_multiplier

    @property
    def steps(self) -> int:
        """Number of steps of the planned run."""
        return self.mechanism.schedule.steps

    @property
    def step(self) -> int:
        """Number of steps released so far."""
        return self._budget.ledger.steps

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon spent so far, at `delta` (default: target_delta); pure, and cached."""
        return self._budget.ledger.epsilon(self.mechanism.target_delta if delta is None else delta)

    def statement(self) -> str:
        """The guarantee reached so far, in one sentence."""
        return self._budget.statement()

    def metrics(self) -> dict[str, float]:
        """Figures of the last logical batch, over all ranks. NOT private: they are data, epsilon does not cover them.

        loss (if `record_loss` was called), realised_batch_size, nonfinite_samples (dropped), clip_fraction,
        gradient_snr (norm of the clipped sum over expected norm of the noise; Anil et al. 2021, Sec. 5.2.1),
        clipped_sum_norm, grad_norm/GROUP (mean), grad_norm_max/GROUP.
        """
        return self._last_metrics.summary()

    def record_loss(self, loss: Tensor) -> None:
        """Note the loss of a micro-batch for `metrics()`.

        `loss` is one value a row, [B], of which padding is left out; or a mean over all rows, [], as it is.
        """
        micro = self._lot.micro if self._lot is not None else None
        self._metrics.add_loss(loss.detach(), None if micro is None else micro.plan.is_padding)

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
    ) -> Iterator[LogicalBatch]:
        """The logical batches of the rest of the run, Poisson-sampled from `dataset`; resumes at `engine.step`.

        Each is an iterable of micro-batches of exactly `micro_batch_size` rows; rows that pad the last ones
        contribute exactly nothing. With None, each is one micro-batch of as many rows as were drawn. Call
        `optimizer.step()` after each logical batch, also after an empty one.
        `steps` asks for so many logical batches instead: a part of the run, or more than was planned, for which
        `target_epsilon` leaves no room. Other arguments are those of DataLoader. Raises DataError for a data set that
        is empty, not map-style, or not of `sample_size`.
        """
        if micro_batch_size is not None:
            check_micro_batch_size(micro_batch_size)
        if steps is not None and not is_count(steps):
            raise ConfigurationError(f"steps={steps!r}: give a number of logical batches, at least 1, or None.")
        loaded = load(
            dataset,
            self._plans(micro_batch_size, steps),
            sample_size=self.mechanism.sample_size,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            worker_init_fn=worker_init_fn,
        )
        return self._logical_batches(loaded)

    def _plans(self, micro_batch_size: int | None, steps: int | None) -> Iterator[MicroBatchPlan]:
        # A generator: nothing is read from the engine before the first batch is asked for, and load_state_dict() may
        # come in between.
        mechanism, backend = self.mechanism, self._backend
        sampler = PoissonSampler(
            mechanism.sample_size,
            mechanism.schedule,
            self._secret,
            secure=self.mechanism.secure,
            max_batch_size=mechanism.max_batch_size,
        )
        end = self.steps if steps is None else self.step + steps
        for step in range(self.step, end):
            drawn = sampler.draw(step)
            size = micro_batch_size or max(1, math.ceil(len(drawn) / backend.world_size))
            yield from plan_micro_batches(drawn, step, size, backend.rank, backend.world_size)

    def _logical_batches(self, loaded: Loaded) -> Iterator[LogicalBatch]:
        if self._lot is not None:
            self._lot.abandoned, self._lot = True, None
        self._end_tapes()
        self._drop_sums()  # of a loop that ended within a logical batch, which is drawn again: it must not count twice
        loads, lot = self._loads, None
        try:
            for plan, data in loaded:
                if not optimizers.knows(self):
                    raise LogicalBatchError(
                        "The engine was detached, and the model is an ordinary one: make a new engine, and load the "
                        "state_dict() of this one to go on with its run."
                    )
                if loads != self._loads or plan.step != self.step or (lot is not None and lot.abandoned):
                    raise LogicalBatchError(
                        "These batches were begun before load_state_dict(), or before another engine.batches(...): "
                        "they are not the next ones of the run. Call engine.batches(...) again."
                    )
                lot = self._lot = LogicalBatch(plan, data, loaded, self._backend.micro_batch)
                yield lot
                lot.require_release()
        finally:
            if lot is not None:
                lot.abandoned = True
                if self._lot is lot and not lot.complete:
                    self._drop_sums()  # the first rows of a Poisson sample are no Poisson sample
                if self._lot is lot and (lot.released or not lot.complete):
                    self._end_tapes()
                    self._lot = None
                # Else optimizer.step() may follow after the loop, and must find the noise of this very batch.

    def _end_tapes(self) -> None:
        """Take no more samples of the forwards so far: a late backward would put them into another release."""
        for tape in self._tapes:
            tape.ended = True

    def _drop_sums(self) -> None:
        if self._state is LotState.COLLECTING:
            self._clipper.abort()
            self._backend.drop_gradients()
            self._state, self._metrics = LotState.EMPTY, BatchMetrics()

    def privatize(self) -> None:
        """Add the noise to the clipped sums and divide by the expected batch size.

        `optimizer.step()` does it by itself; call it for a trainer that looks at gradients before. Does nothing if the
        gradients are private already.
        Raises LogicalBatchError on a half-finished logical batch, BudgetExceededError if the budget is spent.
        """
        if self._state is LotState.PRIVATIZED and (self._lot is None or self._lot.released):
            return
        if self._lot is not None and not self._lot.complete:
            raise LogicalBatchError(
                f"optimizer.step() came after {self._lot.position} of the {len(self._lot)} micro-batches of this "
                f"logical batch. Step once per logical batch, after the loop over its micro-batches."
            )
        if self._state is not LotState.COLLECTING:
            self._backend.refuse_stale_gradients()
            if self._lot is None:
                return  # a step before any backward: there is nothing to release
        self._clipper.abort()
        release = self._budget.next_release()
        self._backend.complete_sums()
        step, mechanism = self.step, self.mechanism
        std = mechanism.noise_multiplier * mechanism.max_grad_norm
        noise = KeyedGaussian(self._noise_secret(), secure=self.mechanism.secure)
        elements = sum(math.prod(shape) for shape in self._backend.shapes.values())
        self._metrics.observe_sum(self._backend.signal_norm(), std * math.sqrt(elements))
        # Counted first: an error in between may only over-state what was spent.
        self._budget.ledger.record(release, on_trust=self._lot is None)
        self._backend.privatize(
            lambda total, name, start: noise.add_(total, step=step, name=name, std=std, start=start),
            mechanism.schedule[step],
        )
        if self._backend.world_size > 1:
            self._metrics.over_ranks(self._labels, self._backend.stack)
        self._state = LotState.PRIVATIZED
        self._interception.forget()
        self._last_metrics, self._metrics = self._metrics, BatchMetrics()
        if self._lot is not None:
            self._lot.released = True
            self._end_tapes()
            if self._lot.abandoned:
                self._lot = None

    def _noise_secret(self) -> bytes:
        # A replayed step of engine.batches has the same batch, so it must have the same noise. Nobody knows whether a
        # loop of the user's own replays its batches: the same noise on others would cancel in the difference.
        if self._lot is not None:
            return self._secret
        return derive_key(self._secret, "own loop", self._nonce.hex())

    def verify(
        self,
        *model_inputs: Any,
        loss_fn: Callable[..., Tensor] | None = None,
        targets: Any = (),
        **model_kwargs: Any,
    ) -> None:
        """Check, on a few rows of `model_inputs`, that every sample has a gradient of its own, and that it is found.

        `loss_fn(output, *targets)` is differentiated if given (targets are tensors with a row per sample), else a
        loss that the model returns, else a random direction of the output. RNG state, buffers and gradients stay as
        they were. On several ranks, all of them call it. Raises VerificationError that names a parameter and likely
        causes.
        """
        targets = (targets,) if isinstance(targets, Tensor) else tuple(targets)
        module = self.model
        args, kwargs = self._interception.arguments(module, model_inputs, model_kwargs)
        run = plan_run(module, self._interception.original(module), args, kwargs, None)
        self._interception.layout_of(run, verify=False)
        self._compare(run, None if loss_fn is None else Loss(loss_fn, targets))

    def detach(self) -> None:
        """Give the model back as an ordinary one; clipped sums that were not privatized are dropped."""
        if self._state is LotState.COLLECTING:
            self._backend.drop_gradients()
        self._interception.uninstall()
        self._backend.detach()
        optimizers.unregister(self)

    def state_dict(self) -> dict[str, Any]:
        """Ledger, step, run secret and mechanism, as plain Python values. Keep it as secret as the data."""
        return checkpoint.pack(self.mechanism, self._secret, self._budget.ledger.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the run that `state` was saved from: same batches, same noise, nothing forgotten.

        Of several ranks, all load the same state. Raises CheckpointError, and changes nothing, if `state` is damaged,
        of another mechanism, or not that of the other ranks; LogicalBatchError in the middle of a logical batch.
        """
        self.require_rest()
        secret, ledger_state = checkpoint.unpack(state, self.mechanism)
        if self._backend.differing({"secret": secret, "ledger": ledger_state}):
            raise CheckpointError(
                "Ranks were given different states: they would draw other batches, release steps again that others "
                "have passed, and count apart. Load one state, saved by one rank, on all of them."
            )
        self._budget.ledger.load_state_dict(ledger_state)
        self._secret = secret
        self._nonce = self._backend.share(new_run_secret())
        self._loads += 1
        self._state, self._lot = LotState.EMPTY, None

    def require_rest(self) -> None:
        """Raise LogicalBatchError in the middle of a logical batch, where no state can be loaded."""
        # Also before its first backward: its samples would be released with the noise of the step that is loaded.
        if self._state is LotState.COLLECTING or (self._lot is not None and not self._lot.released):
            raise LogicalBatchError(
                "load_state_dict() in the middle of a logical batch: load before the loop over engine.batches(...), "
                "or after optimizer.step(), and leave that loop."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> PrivacyEngine:
        """Refused: a copy would draw the same noise, and its model would train without it."""
        raise EngineInUseError(
            "A PrivacyEngine cannot be copied: two of them would draw the same noise. Copy the model alone (the copy "
            "is an ordinary one) and make an engine for it, or save and load state_dict()."
        )

    # --- what interception, optimizers and Checkpointer ask ---------------------------------------------------------

    def owned(self) -> set[Tensor]:
        """The parameters that this engine privatizes, and what optimizers may hold in their stead."""
        return self._backend.held

    def hand_over(self, held: set[Tensor]) -> None:
        """Put private gradients where the optimizer that is about to step on `held` looks for them."""
        self._backend.hand_over(held)

    def training_state(self, optimizer: Any) -> TrainingState:
        """Model and optimizer as a Checkpointer saves and loads them."""
        return self._backend.training_state(optimizer)

    def batch_size(self) -> int | None:
        """See Session."""
        micro = self._lot.micro if self._lot is not None else None
        return None if micro is None else len(micro.plan.is_padding)

    def samples(self) -> int | None:
        """See Session."""
        micro = self._lot.micro if self._lot is not None else None
        return None if micro is None else micro.plan.samples_everywhere

    def open_tape(self, batch_size: int, module: nn.Module) -> Tape:
        """See Session."""
        if self._clipper.pending:
            self._clipper.abort()  # a backward that raised left records behind
        if self._state is not LotState.COLLECTING:
            self._backend.refuse_changed_parameters()
        scale = float(batch_size) if self._mean else 1.0
        micro = self._lot.micro if self._lot is not None else None
        if micro is None:
            if self._lot is not None:
                raise LogicalBatchError(
                    "The model was called for training between two micro-batches of engine.batches, or between two "
                    "logical batches. Evaluate in model.eval() or under torch.no_grad(). To send the gradient of "
                    "another model through it, as a GAN does, use model.eval().requires_grad_(False), and undo both "
                    "afterwards."
                )
            self._warn_of_own_loop()
            if module is not self.model:
                raise LogicalBatchError(
                    f"{type(module).__name__}, a part of the model, was called directly: its gradients would be "
                    f"clipped apart from the rest. Call the whole model, or iterate over engine.batches(...), which "
                    f"says which calls belong to the same samples."
                )
            tape = Tape(self._clipper, batch_size, None, scale)
        else:
            if micro.tape is None:
                device = next(iter(self._backend.parameters.values())).device
                micro.tape = Tape(self._clipper, batch_size, micro.plan.is_padding.to(device), scale)
            tape = micro.tape
            if tape.aborted:
                raise LogicalBatchError(
                    "Backward failed on this micro-batch, and part of its samples may have been counted: go on with "
                    "the next micro-batch rather than repeating this one."
                )
        tape.forwards += 1
        self._tapes.add(tape)
        return tape

    def first_forward(self, module: nn.Module, run: Run) -> None:
        """See Session."""
        if self._verify:
            self._compare(run, None)

    def _compare(self, run: Run, loss: Loss | None) -> None:
        compare(self._interception, self._backend, self._clipper, run, loss, mean=self._mean)

    def _deliver(self, names: Sequence[str], take: Take) -> Sequence[Tensor | None]:
        leaf = self._backend.anchored[names[0]]
        if leaf.requires_grad and not accumulates(leaf):
            raise LogicalBatchError(
                "torch.autograd.grad(loss, parameters) would hand out clipped sums without noise, and no step would be "
                "counted. Call loss.backward(), then engine.privatize(), and read the gradients from .grad."
            )
        if self._state is not LotState.COLLECTING:
            self._backend.refuse_stale_gradients()
            self._state = LotState.COLLECTING
        return self._backend.reduce(names, take)

    def _observe(self, group: ClippingGroup, norm_B: Tensor, factor_B: Tensor, is_padding_B: Tensor | None) -> None:
        self._metrics.observe(group, norm_B, factor_B, is_padding_B)

    def _warn_of_own_loop(self) -> None:
        if not self._own_loop_warned:
            self._own_loop_warned = True
            warnings.warn(
                "This loop feeds its own batches: epsilon holds only if each was drawn by Poisson sampling with "
                "probability batch_size / sample_size (a shuffled DataLoader is not), and if no sample is in two "
                "forwards of one step. engine.batches(dataset, micro_batch_size) sees to both.",
                stacklevel=2,
            )
