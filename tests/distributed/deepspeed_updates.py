"""A training by DeepSpeed, compared with the same training in one process.

A case is STAGE:STYLE:MODE[+OPTION...].

Options for both sides: adamw, groups (an explicit clipping style), rare (batches that are often empty), hf (GPT-2 of
transformers), tracked (adaptive thresholds), correlated and buffered (noise over steps; see CORRELATED). For DeepSpeed:
checkpoint (non-reentrant), compile (every block), config (DeepSpeed makes the optimizer, AdamW), init (zero.Init), step
(after every micro-batch, as DeepSpeed's scripts do), torch (loss.backward()), privatize (by hand), skip (no backward
where all rows are padding), waiting (offload_records), verified (the engine verifies the model), bf16, and the features
of `configuration`.
"""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dpshard import BandedInverse, BandMF, PrivacyEngine, QuantileTracking
from tests import seeds
from tests.distributed.deepspeed_setup import configuration, deepspeed, masters, start, whole
from tests.distributed.update_worker import GPT2, SAMPLES, SECRET, Model, prepare

CORRELATED: dict[str, dict[str, Any]] = {
    "correlated": {"sampling": "fixed-order", "noise_correlation": BandedInverse(bands=3)},
    "buffered": {"sampling": "cyclic-poisson", "noise_correlation": BandMF(bands=3, buffers=True)},
}
"""Settings of the engine for noise that is correlated over five steps, by option."""


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (SAMPLES, 4), generator=generator)
    return TensorDataset(ids, torch.randint(0, 11, (SAMPLES,), generator=generator))


def optimizer_of(model: nn.Module, options: set[str]) -> torch.optim.Optimizer:
    if options & {"adamw", "config"}:
        # A large eps: Adam divides rounding errors of tiny gradients by the tiny gradients.
        return torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-2)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def private(model: nn.Module, style: object, mode: str, options: set[str], *, verify: bool = True) -> PrivacyEngine:
    correlated = [settings for option, settings in CORRELATED.items() if option in options]
    engine = PrivacyEngine(
        model,
        batch_size=1 if "rare" in options else 12,
        steps=6 if "rare" in options else 5 if correlated else 3,
        noise_multiplier=0.5,
        max_grad_norm=3.0 if "hf" in options else 6.0,  # some samples are clipped, and some are not
        sample_size=SAMPLES,
        clipping_fn="abadi",
        clipping_style=style,  # type: ignore[arg-type]
        clipping_mode=mode,
        accountant="gdp",  # which takes no time
        offload_records="waiting" in options,
        adaptive_clipping=QuantileTracking(learning_rate=0.5, budget_share=0.1) if "tracked" in options else None,
        verify=verify,
        **(correlated[0] if correlated else {}),
    )
    seeds.give_secret(engine, SECRET)
    return engine


def train_sharded(model: nn.Module, stage: int, style: object, mode: str, options: set[str]) -> PrivacyEngine:
    optimizer = None if "config" in options else optimizer_of(model, options)
    model_engine = start(model, configuration(stage, *options), optimizer)
    engine = private(model_engine, style, mode, options, verify="verified" in options)
    for logical_batch in engine.batches(data(), 4):
        for x, y in logical_batch:
            if "skip" in options and bool(logical_batch.is_padding.all()):
                continue
            loss = F.cross_entropy(model_engine(x).mean(1), y)
            loss.backward() if "torch" in options else model_engine.backward(loss)
            if "step" in options:
                model_engine.step()
        if "privatize" in options:
            engine.privatize()
        if "step" not in options:
            model_engine.step()
    return engine


def train_alone(model: nn.Module, style: object, options: set[str]) -> dict[str, Any]:
    """Figures of the training in one process, and the parameters that it ends with."""
    with mock.patch("torch.distributed.is_initialized", return_value=False):
        engine = private(model, style, "auto", options, verify=False)
        optimizer, clipped = optimizer_of(model, options), []
        for logical_batch in engine.batches(data(), 7):
            for x, y in logical_batch:
                F.cross_entropy(model(x).mean(1), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            clipped.append(engine.metrics()["clip_fraction"])
    trained = {name: p.detach() for name, p in model.named_parameters()}
    return {"clipped": clipped, "epsilon": engine.epsilon(), "metrics": engine.metrics(), "trained": trained}


def run(case: str) -> dict[str, object]:
    spec, *flags = case.split("+")
    stage, style, mode = spec.split(":")
    options = set(flags)
    build = GPT2 if "hf" in options else Model
    torch.manual_seed(0)
    alone = build()
    before = {name: p.detach().clone() for name, p in alone.named_parameters()}
    if "init" in options:
        torch.manual_seed(0)
        with deepspeed.zero.Init(config_dict_or_path=configuration(int(stage), *options)):
            model = build()
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            if dist.get_rank() == 0:
                for name, p in model.named_parameters():
                    p.data.copy_(before[name])
    else:
        model = build()
        model.load_state_dict(alone.state_dict())
    model = prepare(model, options & {"checkpoint"})
    for block in model.blocks if "compile" in options else ():
        block.compile(backend="aot_eager", fullgraph=True)
    groups = [list(before)[::2], list(before)[1::2]] if "groups" in options else style
    engine = train_sharded(model, int(stage), groups, mode, options)
    alone_on_rank_0 = [train_alone(alone, groups, options) if dist.get_rank() == 0 else {}]
    dist.broadcast_object_list(alone_on_rank_0)
    expected = alone_on_rank_0[0]
    # In bf16 the update is in the fp32 copies. (DeepSpeed mistakes them for each other under round_robin_gradients.)
    found, trained = masters(model) if "bf16" in options else whole(model), expected["trained"]
    change = torch.cat([(p - before[n]).flatten() for n, p in trained.items()]).norm()
    return {
        "case": case,
        "error": max(float((found[n] - p).norm() / change) for n, p in trained.items()),
        "epsilon": [engine.epsilon(), expected["epsilon"]],
        "metrics": [engine.metrics(), expected["metrics"]],
        "clipped": expected["clipped"],
    }
