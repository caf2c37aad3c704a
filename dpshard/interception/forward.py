"""The forward of a model with patched modules; see docs/architecture.md."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpshard.clipping.tape import Tape
from dpshard.clipping.two_pass import through_two_passes
from dpshard.errors import REENTRANT, BatchLayoutError, UnsupportedParameterError
from dpshard.interception.active import ActiveForward
from dpshard.interception.batch_dims import Layout
from dpshard.interception.compiled import CompiledRegions
from dpshard.interception.isolation import IsolatedForward
from dpshard.interception.kinds import kind_of_contents
from dpshard.interception.layouts import ATTEMPTS, NEW_COURSE, Layouts
from dpshard.interception.mode import UnknownCall
from dpshard.interception.module_hooks import refuse_hooks, with_recomputed_weights
from dpshard.interception.packed import plan_packed_run
from dpshard.interception.parameter_writes import WriteGuard
from dpshard.interception.parameters import TrainedParameters
from dpshard.interception.patching import ModulePatcher
from dpshard.interception.protocols import ShardingHooks, TapeProvider
from dpshard.interception.refusals import refuse_batch_norm, refuse_shared_outliers
from dpshard.interception.replay import Replay
from dpshard.interception.run import Run, plan_run, refuse_two_batch_dimensions
from dpshard.names import is_compiled_wrapper
from dpshard.rules.call import Source
from dpshard.sampling import MicroBatchPlan

_NOT_COMPILED = (
    "dpshard runs forward around a compiled model, not within it. Compile the model, or its blocks, before you make "
    "the PrivacyEngine; functions that call forward, backward or step must not have fullgraph=True"
)


class Interception:
    """The recorded forwards of one model.

    `before_forward` gets the kind of the inputs. If it verifies (`verified`), probes may leave row orders undecided.
    """

    def __init__(
        self,
        model: nn.Module,
        sources: dict[Tensor, Source],
        session: TapeProvider,
        sharding: ShardingHooks,
        before_forward: Callable[[Run, Any], None],
        rows_per_unit: int = 1,
        *,
        verified: bool = True,
        alone: bool = True,
    ) -> None:
        self._model, self._session, self._before_forward = model, session, before_forward
        self._rows_per_unit, self._note_inputs = rows_per_unit, sharding.note_inputs
        self._active = active = ActiveForward()
        self._parameters = parameters = TrainedParameters(model, sources, sharding, active)
        isolate = functools.partial(IsolatedForward, model, active, WriteGuard(model))
        self._regions = CompiledRegions(parameters, active, isolate)
        self.layouts = Layouts(parameters, sharding, isolate, verified=verified, alone=alone)
        self.replay = Replay(parameters, self.layouts, active, isolate)
        self.patcher = ModulePatcher(parameters, active, self._regions, self._enter)
        self._recomputing = False
        # Slots cannot be made within the graph of a model that was compiled after its engine was made.
        self._outermost: Any = torch.compiler.disable(self._run_outermost, reason=_NOT_COMPILED)
        refuse_shared_outliers(model)
        self._batch_norms = [
            (path, module)
            for path, module in model.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
        ]

    def install(self) -> None:
        """Patch the modules."""
        self.patcher.install()

    def forget(self) -> None:
        """Drop the context in which checkpointing repeats a forward."""
        self._active.repeat = None

    def plan(self, args: Any, kwargs: Any) -> Run:
        """Return the call of the model as a Run, after a probe of its batch dimensions."""
        args, kwargs = self.replay.arguments(self._model, args, kwargs)
        run = self._planned(self._model, self.patcher.original(self._model), args, kwargs, None)
        return self.layouts.probed(self.layouts.as_read(run))[0]

    def _planned(self, module: nn.Module, original: Any, args: Any, kwargs: Any, plan: MicroBatchPlan | None) -> Run:
        packed = self._session.packed
        if packed is not None:
            return plan_packed_run(module, original, args, kwargs, packed)
        return plan_run(module, original, args, kwargs, plan, self._rows_per_unit)

    def _enter(self, module: nn.Module, original: Any, compiled: bool, args: Any, kwargs: Any) -> Any:
        active = self._active
        if active.running and active.mode is not None:
            if compiled and not torch.compiler.is_compiling():
                return self._regions.call(module, original, args, kwargs)
            region = active.region
            if region is not None and not region.entered:
                return region.run(original, args, kwargs)
            return original(*args, **kwargs)
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return self._recompute(module, original, compiled, args, kwargs)
        if active.running or not torch.is_grad_enabled() or not module.training:
            return original(*args, **kwargs)  # evaluation, or a pipeline that infers shapes
        return self._outermost(module, original, compiled, args, kwargs)

    def _recompute(self, module: nn.Module, original: Any, compiled: bool, args: Any, kwargs: Any) -> Any:
        if self._active.repeat is None or self._recomputing:
            return original(*args, **kwargs)
        self._recomputing = True
        try:
            with self._active.repeat():
                if compiled and self._active.mode is not None:
                    return self._regions.call(module, original, args, kwargs)
                return original(*args, **kwargs)
        except UnknownCall as error:
            raise UnsupportedParameterError(REENTRANT) from error
        finally:
            self._recomputing = False

    def _run_outermost(self, module: nn.Module, original: Any, compiled: bool, args: Any, kwargs: Any) -> Any:
        if torch.jit.is_tracing():
            raise UnsupportedParameterError(
                "torch.jit.trace records one path through a model, and none of its per-sample gradients. Call "
                "engine.detach() before, or trace copy.deepcopy(model), which is an ordinary model."
            )
        with self._session.forward(module) as trained:
            if trained:
                return self._run_recorded(module, original, compiled, args, kwargs)
        with self._active.suspended():
            return original(*args, **kwargs)

    def _run_recorded(self, module: nn.Module, original: Any, compiled: bool, args: Any, kwargs: Any) -> Any:
        if self._batch_norms:
            refuse_batch_norm(self._batch_norms, self._model)
        if original != module._call_impl and (not compiled or is_compiled_wrapper(module)):
            refuse_hooks(module)
        if not compiled:
            original = with_recomputed_weights(module, original)
        session, parameters = self._session, self._parameters
        repeatable = parameters.repeatable(module, original)
        run = self._planned(module, repeatable, args, kwargs, session.plan)
        rows = session.rows
        if rows is not None:
            rows.enter(run)
        if module is not self._model:
            refuse_two_batch_dimensions(run)
        if self._note_inputs is not None:
            self._note_inputs([x for x, _ in run.carrying()])
        run, layout = self._prepare(run)
        if rows is not None:
            rows.read(run)
        tape = session.open_tape(run.batch_size, module)
        versions = parameters.versions()
        if compiled:
            call = functools.partial(self._regions.call, module, original, args, kwargs)
        else:
            call = functools.partial(original, *args, **kwargs)
        forward = functools.partial(self._record, run, call, layout, tape)
        output = through_two_passes(forward, tape) if session.two_passes else forward()
        if rows is not None:
            rows.leave(output)
        tape.forwards.end(pytree.tree_leaves(output))
        parameters.refuse_writes(versions)
        return output

    def _prepare(self, run: Run) -> tuple[Run, Layout]:
        run = self.layouts.as_read(run)
        contents = kind_of_contents(run)  # a probe may change them
        run, key = self.layouts.probed(run)
        self._before_forward(run, (key[0], contents))
        self._parameters.unshard(run.module)
        return run, self.layouts.found[key]

    def _record(self, run: Run, call: Callable[[], Any], layout: Layout, tape: Tape) -> Any:
        for _ in range(ATTEMPTS):
            mode = self.layouts.mode(run, layout, tape)
            try:
                with self._active.recorded(mode):
                    return call()
            except UnknownCall:
                self.layouts.probe(run.beginning_with(mode.suspects(2)), into=layout)
                self._before_forward(run, object())
                self._parameters.unshard(run.module)
        raise BatchLayoutError(NEW_COURSE)
