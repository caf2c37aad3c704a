"""The patched forwards of a model.

[Note: Where interception happens]
Every module that holds parameters gets a forward of its own. The outermost such call opens a tape and enters a
TorchFunctionMode, in which all inner modules run as they are. Under activation checkpointing a module runs again
inside backward: then it enters the mode anew, with slots that lead nowhere, since only the recomputed tensors matter.
A compiled module is wrapped outside of its compiled call, where its slots are made; see regions.py.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from dpshard.clipping.autograd_nodes import leave_nodes_out_of_graphs
from dpshard.clipping.tape import Tape
from dpshard.clipping.two_pass import through_two_passes
from dpshard.errors import REENTRANT, BatchLayoutError, DpshardError, UnsupportedParameterError
from dpshard.interception.batch_dims import Layout, find_layout, merge
from dpshard.interception.compiled import CompiledRegions
from dpshard.interception.determinism import AS_DRAWN, DeterministicForward, Draws
from dpshard.interception.isolation import IsolatedForward, eager
from dpshard.interception.kinds import kind_of_contents, kind_of_run
from dpshard.interception.mode import InterceptionMode, UnknownCall
from dpshard.interception.module_hooks import has_hooks, refuse_hooks
from dpshard.interception.parameter_writes import written
from dpshard.interception.protocols import ShardingHooks, TapeProvider
from dpshard.interception.recomputed import with_recomputed_weights
from dpshard.interception.refusals import refusal, refuse_batch_norm
from dpshard.interception.run import Run, plan_run, refuse_two_batch_dimensions
from dpshard.interception.running import ActiveMode
from dpshard.interception.slots import RecomputeSlots, SlotMaker
from dpshard.names import is_compiled_wrapper
from dpshard.rules.call import Source
from dpshard.rules.torch_functions import Quiet

ATTEMPTS = 8
"""How often a forward is begun again when it takes a course that was not probed."""
_NOT_COMPILED = (
    "dpshard runs forward around a compiled model, not within. Compile the model, or its blocks, before its "
    "PrivacyEngine is made; leave fullgraph=True out of functions that call forward, backward or step"
)
_NEW_COURSE = (
    "The model takes another course in every forward, so its use of parameters cannot be learnt. Remove control flow "
    "that depends on random numbers or on the data of a single sample."
)


class Interception:
    """The patched forwards of one model.

    `before_forward` is called with the kind of the inputs before every forward that is recorded: time to verify.
    """

    def __init__(
        self,
        model: nn.Module,
        sources: dict[Tensor, Source],
        session: TapeProvider,
        sharding: ShardingHooks,
        before_forward: Callable[[Run, Any], None],
    ) -> None:
        self.model = model
        self.sources = sources
        self.sources_by_name = {source.label: source for source in sources.values()}
        self.session = session
        self.sharding = sharding
        self.active = False
        """Whether a forward is running, so that the modules called within it run as they are."""
        self.mode: InterceptionMode | None = None
        """The mode of that forward; None if it is an ordinary one."""
        self.layouts: dict[Any, Layout] = {}
        """By the kind of the inputs; see `layout_of`."""
        self.readings: dict[Any, tuple[int | None, ...]] = {}
        """By the kind of the inputs: which carry samples, where probes have corrected what their sizes said."""
        self.freed: set[str] = set()
        """Names of the parameters that exist only while a module runs."""
        self.scripted = False
        """Whether forward calls functions of torch.jit.script."""
        self.regions = CompiledRegions(self)
        self._before_forward = before_forward
        self._codes: dict[type[nn.Module], types.CodeType] = {}
        self._patched: list[tuple[nn.Module, str, Any]] = []  # module, attribute, what was there before
        self._hooks: list[RemovableHandle] = []
        self._again: Callable[[], AbstractContextManager[Any]] | None = None  # how backward repeats a forward
        self._recomputing = False
        # A model that is compiled after its engine was made runs as it is from here on: slots cannot be made within.
        self._outermost: Any = torch.compiler.disable(self._run_outermost, reason=_NOT_COMPILED)
        self._parameters = [(name, p) for name, p in model.named_parameters() if type(p) is nn.Parameter]
        self._batch_norms = [
            (path, module)
            for path, module in model.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
        ]

    # --- installation ---------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Patch every module that holds parameters; UnsupportedParameterError for scripted ones."""
        leave_nodes_out_of_graphs()
        for path, module in self.model.named_modules():
            if next(module.parameters(), None) is None:
                continue
            if isinstance(module, torch.jit.ScriptModule):
                if any(parameter.requires_grad for parameter in module.parameters()):
                    raise UnsupportedParameterError(
                        f"{path or 'the model'} is compiled by torch.jit.script, into which dpshard cannot see. Use "
                        f"the Python module (and torch.compile), or freeze its parameters with requires_grad_(False)."
                    )
                continue
            if module._compiled_call_impl is not None:
                self._patch(module, "_compiled_call_impl", compiled=True)
            if self.sharding.gathers(module):
                self._skip_sharding_hooks(module, compiled=module._compiled_call_impl is not None)
            elif module._compiled_call_impl is None and (module is self.model or has_hooks(module)):
                self._enter_with_hooks(module)
            self._patch(module, "forward", compiled=is_compiled_wrapper(module))

    def _patch(self, module: nn.Module, attribute: str, *, compiled: bool) -> None:
        previous = module.__dict__.get(attribute)
        self._patched.append((module, attribute, previous))
        enter = self._enter
        original = previous if previous is not None else types.MethodType(getattr(type(module), attribute), module)

        def on_copy(copy: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if isinstance(previous, types.MethodType):
                return previous.__func__(copy, *args, **kwargs)
            return (
                previous(*args, **kwargs)
                if previous is not None
                else getattr(type(copy), attribute)(copy, *args, **kwargs)
            )

        # A bound method: a deep copy of the module binds it to the copy, which then is an ordinary module.
        def forward(self_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self_module is not module:
                return on_copy(self_module, *args, **kwargs)
            return enter(module, original, compiled, args, kwargs)

        forward.__code__ = self._code_for(type(module), forward.__code__)
        if attribute == "forward":
            functools.update_wrapper(forward, getattr(type(module), "forward"), updated=())  # noqa: B009
        module.__dict__[attribute] = types.MethodType(forward, module)

    def _code_for(self, kind: type[nn.Module], code: types.CodeType) -> types.CodeType:
        """A copy of `code` for the modules of one class in this model.

        Dynamo compiles code a few times and leaves it eager from then on. One code for all would use that up after a
        few models in a process; one for every module would have equal blocks compiled one by one.
        """
        if kind not in self._codes:
            self._codes[kind] = code.replace(co_name=f"{kind.__name__}_{code.co_name}")
        return self._codes[kind]

    def _enter_with_hooks(self, module: nn.Module) -> None:
        """Have calls of `module` enter before its hooks, if it has some."""
        self._patched.append((module, "_compiled_call_impl", None))

        def call(self_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self_module is not module or self.active or not has_hooks(module):
                return self_module._call_impl(*args, **kwargs)
            if torch._C._current_graph_task_id() != -1:  # in backward
                return self_module._call_impl(*args, **kwargs)
            return self._enter(module, module._call_impl, False, args, kwargs)

        module.__dict__["_compiled_call_impl"] = types.MethodType(call, module)

    def _skip_sharding_hooks(self, module: nn.Module, *, compiled: bool) -> None:
        """Keep the mode out of the hooks with which a framework gathers and frees the parameters of `module`."""
        previous = module.__dict__.get("_compiled_call_impl")
        original = previous if previous is not None else module._call_impl
        self._patched.append((module, "_compiled_call_impl", previous))

        def call(self_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self_module is not module:
                return self_module._call_impl(*args, **kwargs)
            with Quiet.set(self.active):
                return original(*args, **kwargs)

        module.__dict__["_compiled_call_impl"] = types.MethodType(call, module)

        looking: list[ExitStack] = []

        @torch.compiler.disable
        def gathered(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._bind(module)
            looking.append(ExitStack())
            looking[-1].enter_context(Quiet.set(False))
            if compiled and self.active and self.mode is not None:
                looking[-1].enter_context(self.regions.slots_for(module, module.forward, args, kwargs))

        @torch.compiler.disable
        def done(*_: Any) -> None:
            if looking:
                looking.pop().close()

        # Between the framework's hooks and the forward, which may be compiled: after the ones and before the others.
        self._hooks.append(module.register_forward_pre_hook(cast(Any, gathered), with_kwargs=True))
        self._hooks.append(module.register_forward_hook(cast(Any, done), prepend=True, always_call=True))

    def forget(self) -> None:
        """Let go of what the last forward derived from parameters: no backward is to come."""
        self._again = None

    def uninstall(self) -> None:
        """Give every module its own forward back."""
        for module, attribute, previous in reversed(self._patched):
            if previous is None:
                module.__dict__.pop(attribute, None)
            else:
                module.__dict__[attribute] = previous
        self._patched.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # --- forward --------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, original: Any, compiled: bool, args: Any, kwargs: Any) -> Any:
        if self.active and self.mode is not None:
            if compiled and not torch.compiler.is_compiling():
                return self.regions.call(module, original, args, kwargs)
            return original(*args, **kwargs)
        if torch.compiler.is_compiling() and torch.is_grad_enabled() and module.training:
            return self._outermost(module, original, compiled, args, kwargs)
        if torch._C._current_graph_task_id() != -1:
            return self._recompute(module, original, compiled, args, kwargs)
        if self.active or not torch.is_grad_enabled() or not module.training:
            return original(*args, **kwargs)
        return self._outermost(module, original, compiled, args, kwargs)

    def _bind(self, module: nn.Module) -> None:
        """Learn the parameters that exist only while `module` runs (sharded ones, gathered)."""
        with Quiet.set(True):
            for name, parameter in self.sharding.bind(module):
                self.sources[parameter] = self.sources_by_name[name]
                self.freed.add(name)
                if self.mode is not None and parameter.requires_grad:
                    self.mode.sources[parameter] = self.sources_by_name[name]
                elif self.mode is not None:
                    self.mode.sources.pop(parameter, None)  # frozen since it was gathered last

    def _recompute(self, module: nn.Module, original: Any, compiled: bool, args: Any, kwargs: Any) -> Any:
        if self._again is None or self._recomputing:
            return original(*args, **kwargs)
        self._recomputing = True
        try:
            with self._again():
                if compiled and self.mode is not None:
                    return self.regions.call(module, original, args, kwargs)
                return original(*args, **kwargs)
        except UnknownCall as error:
            raise UnsupportedParameterError(REENTRANT) from error
        finally:
            self._recomputing = False

    def _recorded(self, mode: InterceptionMode, *, beside: AbstractContextManager[Any] | None = None) -> ActiveMode:
        """Enter `mode`, and again, with slots that lead nowhere, where checkpointing repeats a part of this forward."""

        def again() -> AbstractContextManager[Any]:
            stack = ExitStack()
            stack.enter_context(beside or nullcontext())
            # What was derived before the segment enters it as an argument.
            repeated = self.new_mode(mode.layout, RecomputeSlots(mode.slots.batch_size), mode.sources)
            stack.enter_context(ActiveMode(self, repeated))
            return stack

        self._again = again
        return ActiveMode(self, mode)

    def _run_outermost(self, module: nn.Module, original: Any, compiled: bool, args: Any, kwargs: Any) -> Any:
        if torch.jit.is_tracing():
            raise UnsupportedParameterError(
                "torch.jit.trace records one path through a model, and none of its per-sample gradients. Call "
                "engine.detach() before, or trace copy.deepcopy(model), which is an ordinary model."
            )
        refuse_batch_norm(self._batch_norms)
        if original != module._call_impl and (not compiled or is_compiled_wrapper(module)):
            refuse_hooks(module)
        if not compiled:
            original = with_recomputed_weights(module, original)
        run = plan_run(module, self._repeatable(module, original), args, kwargs, self.session.plan)
        rows = self.session.rows
        if rows is not None:
            rows.enter(run)
        if module is not self.model:
            refuse_two_batch_dimensions(run)
        layout = self.layout_of(run)
        run = self.as_read(run)
        tape = self.session.open_tape(run.batch_size, module)
        versions = self._versions()

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal layout
            for _ in range(ATTEMPTS):
                mode = self.new_mode(layout, tape)
                try:
                    with self._recorded(mode):
                        if compiled:
                            return self.regions.call(module, original, args, kwargs)
                        return original(*args, **kwargs)
                except UnknownCall:
                    # Another course through the model (a skipped layer, a new branch): probe it too, and start again.
                    layout = self._probe(run.beginning_with(mode.routing.suspects(2)), into=layout)
                    self._before_forward(run, object())
                    self._gather(module)
            raise BatchLayoutError(_NEW_COURSE)

        if self.session.two_passes:
            output = through_two_passes(forward, args, kwargs, tape)
        else:
            output = forward(*args, **kwargs)
        if rows is not None:
            rows.leave(output)
        tape.forwards.end(pytree.tree_leaves(output))
        for (name, _), before, after in zip(self._parameters, versions, self._versions(), strict=True):
            if before != after:
                raise written(name)
        return output

    def _versions(self) -> list[int]:
        """How often each parameter was written to: by optimizers between forwards, by nobody within one."""
        return [p._version for _, p in self._parameters]

    def original(self, module: nn.Module) -> Callable[..., Any]:
        """The forward of `module` as it was before it was patched."""
        previous = next((p for m, attribute, p in self._patched if m is module and attribute == "forward"), None)
        original = previous if previous is not None else types.MethodType(type(module).forward, module)
        if has_hooks(module) and not self.sharding.gathers(module):
            original = module._call_impl
        return self._repeatable(module, with_recomputed_weights(module, original))

    def _repeatable(self, module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        """`original`, for calls beside the hooks of `module`: a backward in between has freed what they gathered."""
        if not self.sharding.gathers(module):
            return original

        def gathered(*args: Any, **kwargs: Any) -> Any:
            self._gather(module)
            return original(*args, **kwargs)

        return gathered

    def arguments(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What the forward of `module` gets when it is called with these: FSDP casts inputs, in a hook before it.

        The call is an ordinary one. It also lets FSDP find its root, which it does in the first call of all.
        """
        if not self.sharding.gathers(module):
            return args, kwargs
        seen: list[tuple[Any, Any]] = []
        hook = module.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
        try:
            with self.undisturbed(module) as state, torch.no_grad():
                state.guarded(functools.partial(module, *args, **kwargs))
        finally:
            hook.remove()
        return seen[0]

    def _gather(self, module: nn.Module) -> None:
        if self.sharding.gathers(module):
            with Quiet.set(True):
                self.sharding.gather(module)
            self._bind(module)

    def layout_of(self, run: Run, *, verify: bool = True) -> Layout:
        """The layout for inputs of this kind, found when they come for the first time; the model is verified if due."""
        run = self.as_read(run)
        contents = kind_of_contents(run)
        if kind_of_run(run) not in self.layouts:
            run = self._read(run)
        kind = kind_of_run(run)
        if verify:
            self._before_forward(run, (kind, contents))
            self._gather(run.module)
        return self.layouts[kind]

    def as_read(self, run: Run) -> Run:
        """`run`, with the inputs that carry samples as probes have found."""
        dims = self.readings.get(kind_of_run(run)) if self.readings else None
        return run if dims is None else replace(run, dims=dims)

    def _read(self, run: Run) -> Run:
        """`run` as the model takes it, probed: what has the size of the batch by chance does not stand to be cut."""
        kind = kind_of_run(run)
        try:
            self.layouts[kind] = self._probe(run, into={})
            return run
        except BatchLayoutError:
            if self.sharding.gathers(run.module):  # all ranks probe as often
                raise
            for reading in run.other_readings():
                try:
                    self.layouts[kind_of_run(reading)] = self._probe(reading, into={})
                except BatchLayoutError:
                    continue
                self.readings[kind] = reading.dims
                return reading
            raise

    def _probe(self, run: Run, into: Layout) -> Layout:
        try:
            with self.sharding.dry_run(), self.undisturbed(run.module) as state, torch.enable_grad():

                def first(n: int, rows: int) -> Any:
                    state.rewind()
                    return state.guarded(functools.partial(run.first, n, rows))

                # A branch that values decide (is anything masked?) is taken alike where no sample is new.
                alike = functools.partial(first, rows=min(2, run.rows))
                if self.sharding.gathers(run.module):  # where all ranks have to run as often
                    found = find_layout(alike, self.trainable)
                else:
                    try:
                        found = find_layout(functools.partial(first, rows=run.rows), self.trainable)
                    except BatchLayoutError:
                        found = find_layout(alike, self.trainable)
        except (RuntimeError, ValueError, IndexError) as error:
            if isinstance(error, DpshardError):
                raise
            if not self.sharding.gathers(run.module):  # other ranks need not have failed, and would not take part
                self._try_whole(run)
            cut = [(tuple(x.shape), d) for x, d in zip(run.leaves, run.dims, strict=True) if isinstance(x, Tensor)]
            raise BatchLayoutError(
                f"{type(run.module).__name__} failed on 2 or 3 of its {run.batch_size} samples ({error}). Its inputs "
                f"were cut along (shape, dimension) {cut}: is that where they carry the samples? Pass what has no "
                f"sample dimension as a buffer or a constant rather than as an input, and all rows of a micro-batch."
            ) from error
        merge(into, found)
        return into

    def _try_whole(self, run: Run) -> None:
        """Raise what `run` raises on all of its samples: such an error has nothing to do with where they are."""
        with self.undisturbed(run.module) as state, torch.no_grad():
            state.guarded(functools.partial(self.run_plain, run, list(range(run.batch_size))))

    def undisturbed(self, module: nn.Module) -> IsolatedForward:
        """A block in which forwards of `module` are ordinary ones and leave generators and the model as they were."""
        return IsolatedForward(self, module)

    def run_recorded(
        self, run: Run, samples: list[int], tape: Callable[[], Tape], state: IsolatedForward, draws: Draws = AS_DRAWN
    ) -> Any:
        """The output for `samples`, recorded on a tape, dropout off, compilation off, from the state of `state`."""
        layout = self.layouts[kind_of_run(run)]
        for _ in range(ATTEMPTS):
            state.rewind(draws)
            mode = self.new_mode(layout, tape())
            try:
                undropped = functools.partial(DeterministicForward, len(samples), draws)
                with eager(), undropped(), self._recorded(mode, beside=undropped()):
                    return run.on(samples)
            except UnknownCall:
                state.rewind(draws)
                self._probe(run.beginning_with([samples[i] for i in mode.routing.suspects(2)]), into=layout)
        raise BatchLayoutError(_NEW_COURSE)

    def run_plain(self, run: Run, samples: list[int], draws: Draws = AS_DRAWN) -> Any:
        """The output for `samples` through plain autograd, dropout off, compilation off."""
        self._again = functools.partial(DeterministicForward, len(samples), draws)
        with eager(), self._again():
            return run.on(samples)

    def new_mode(
        self, layout: Layout, slots: SlotMaker, sources: dict[Tensor, Source] | None = None
    ) -> InterceptionMode:
        """A mode that knows `sources`, by default the trainable parameters."""
        return InterceptionMode(
            self.trainable() if sources is None else sources, layout, slots, functools.partial(refusal, self.model)
        )

    def trainable(self) -> dict[Tensor, Source]:
        """The parameters that are trained now; one that was frozen after the engine was made is a constant."""
        return {parameter: source for parameter, source in self.sources.items() if parameter.requires_grad}
