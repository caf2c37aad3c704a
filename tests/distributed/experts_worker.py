"""One rank of trainings with experts on several ranks, each compared with one process; prints JSON.

Usage: torchrun --nproc_per_node=W experts_worker.py KIND:STYLE:MODE[+OPTION...] [...]

All ranks hold other experts. Kinds: samples (each rank has samples of its own, under DistributedDataParallel; rows go
to the experts' ranks and back by all-to-all), sequence (all have the same samples, each a part of every sequence),
whole (each has all rows of the same samples; the experts' outputs are added up). Options: verified, checkpointed,
digested (sums are not taken for equal), those of FAULTS, and

columns: the head's weight is cut by columns, as by tensor parallelism; full: experts take a limited number of rows, and
return zeros for others; nearby: a norm between the experts' matrices is the same on all ranks; local: the experts meet
the rank's own rows; reduced: DistributedDataParallel reduces experts; centred: a layer subtracts the mean of the
samples of all ranks.
"""

import math
import sys
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine
from dpshard.errors import DpshardError
from tests import seeds
from tests.distributed.declared_parts_worker import Gathered, Into, OutOf
from tests.distributed.rank import alone, main
from tests.sums import taken_for_equal

T, D, E, K = 4, 4, 4, 2
SECRET = bytes(range(32))
SAMPLES, STEPS = 24, 2
BOUND = 50.0
"""About the median of the norms of samples"""


def own_only(self: Any, cut_B: Tensor, whole_B: Tensor) -> Tensor:
    return cut_B + whole_B


def of_another(self: Any, x_B: Tensor) -> Tensor:
    return x_B.view(self.size, -1)[self.rank - 1]


PARTS = "dpshard.backends.expert_parts.ExpertParts."
FAULTS: dict[str, Any] = {
    "own norms": lambda: mock.patch(PARTS + "norm_sq", own_only),
    "factors of another": lambda: mock.patch(PARTS + "select_own", of_another),
    "summed twice": lambda: mock.patch("dpshard.backends.ddp.DDPReduction._has_experts", False),
}
"""What the norms, factors and sums of a rank must not be."""


class Experts(nn.Module):
    """E experts, or a rank's part of them: two matrices and a bias each. Rows are sorted by expert, `counts` each."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity, self.norm = 0, nn.Identity()
        self.up, self.down = nn.Parameter(torch.randn(E, D, D)), nn.Parameter(torch.randn(E, D, D))
        self.bias = nn.Parameter(torch.randn(E, D))

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        parts = zip(x.split(counts), self.up, self.bias, self.down, strict=True)
        outputs = [self.norm(torch.tanh(rows @ up + bias)) @ down for rows, up, bias, down in parts]
        if self.capacity:
            outputs = [y * (torch.arange(len(y)) < self.capacity)[:, None] for y in outputs]
        return torch.cat(outputs)


class Mixture(nn.Module):
    """The mean of a token's K experts, weighted by their scores. `group`: the ranks that hold experts, or None."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, E), Experts()
        self.kind: str = ""
        self.group: Any = None
        self.at_home = self.centred = False

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, D)
        if self.centred:
            mean_D = x_TD.detach().mean(0)
            dist.all_reduce(mean_D, group=self.group)
            x_TD = x_TD - mean_D / self.group.size()
        score_TK, expert_TK = self.router(x_TD).softmax(1).topk(K, 1)
        if self.group is not None and self.kind == "whole":
            x_TD, score_TK = Into.apply(x_TD, self.group), Into.apply(score_TK, self.group)
        order_N = expert_TK.flatten().argsort(stable=True)
        token_N, score_N = order_N // K, score_TK.flatten()[order_N]
        counts_E = F.one_hot(expert_TK.flatten(), E).sum(0)
        rows_ND = x_TD[token_N]
        if self.group is None:
            y_ND = self.experts(rows_ND, counts_E.tolist())
        elif self.kind != "whole":
            y_ND = self.over_ranks(rows_ND, counts_E)
        else:
            y_ND = self.own(rows_ND, counts_E)
        out_TD = torch.zeros_like(x_TD).index_add(0, token_N, y_ND * score_N[:, None])
        if self.group is not None and self.kind == "whole":
            out_TD = OutOf.apply(out_TD, self.group)
        return out_TD.view_as(x)

    def over_ranks(self, rows_ND: Tensor, counts_E: Tensor) -> Tensor:
        """As torchtitan sends rows to experts: sorted by rank, then by expert; and back."""
        W, e = self.group.size(), E // self.group.size()
        if self.at_home:
            return self.experts(rows_ND, [len(rows_ND), *[0] * (e - 1)])
        counts_We = torch.empty_like(counts_E)
        dist.all_to_all_single(counts_We, counts_E, group=self.group)
        sent, received = (x.view(W, e).sum(1).tolist() for x in (counts_E, counts_We))
        rows_RD = all_to_all_single(rows_ND, received, sent, self.group)
        expert_R = torch.arange(e).repeat(W).repeat_interleave(counts_We)
        order_R = expert_R.argsort(stable=True)
        y_RD = self.experts(rows_RD[order_R, :], counts_We.view(W, e).sum(0).tolist())
        back_RD = y_RD.new_empty(y_RD.shape)
        back_RD[order_R, :] = y_RD
        return all_to_all_single(back_RD, sent, received, self.group)

    def own(self, rows_ND: Tensor, counts_E: Tensor) -> Tensor:
        """The outputs of this rank's experts, and zeros for the others."""
        e = E // self.group.size()
        first = dist.get_rank(self.group) * e
        counts = [sum(some) for some in (counts_E[:first].tolist(), counts_E[first : first + e].tolist())]
        before, here, after = rows_ND.split([*counts, len(rows_ND) - sum(counts)])
        y = self.experts(here, counts_E[first : first + e].tolist())
        return torch.cat([torch.zeros_like(before), y, torch.zeros_like(after)])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.norm, self.mixture = nn.Linear(D, D), nn.LayerNorm(D), Mixture()

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        k = q if self.mixture.kind != "sequence" else Gathered.apply(q, self.mixture.group)
        x = x + (q @ k.mT).softmax(2) @ k
        return x + self.mixture(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(D, 3)
        self.checkpointed, self.group = False, None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        if self.group is None:
            return self.head(x)
        part = Into.apply(x, self.group).chunk(self.group.size(), -1)[dist.get_rank(self.group)]
        return OutOf.apply(F.linear(part, self.head.weight), self.group) + self.head.bias


def cut(model: Model, kind: str, group: Any, options: set[str]) -> None:
    """Make `model` this rank's experts, and the rest."""
    model.checkpointed = "checkpointed" in options
    for block in model.blocks:
        assert isinstance(block, Block)
        mixture = block.mixture
        mixture.kind, mixture.group, mixture.at_home = kind, group, "local" in options
        mixture.centred = "centred" in options
        mixture.experts.capacity = 3 * ("full" in options)
        for name, p in list(mixture.experts.named_parameters()):
            setattr(mixture.experts, name, nn.Parameter(p.detach().chunk(group.size())[dist.get_rank(group)].clone()))
        if "nearby" in options:
            mixture.experts.norm = nn.LayerNorm(D).double()
    if "columns" in options:
        model.group = group
        model.head.weight = nn.Parameter(
            model.head.weight.detach().chunk(group.size(), 1)[dist.get_rank(group)].clone()
        )


def train(model: nn.Module, kind: str, style: str, mode: str, options: set[str], group: Any = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(SAMPLES, T, D, generator=generator, dtype=torch.float64))
    rest = {"sequence": "sum", "whole": "same", "samples": "samples"}[kind]
    told: Any = {"*.experts.norm.*": rest, "*.experts.*": 0, "*": rest}
    if "columns" in options:
        told = {"head.weight": 1, **told}
    engine = PrivacyEngine(
        model,
        batch_size=8,
        sample_size=SAMPLES,
        steps=STEPS,
        noise_multiplier=0.3,
        max_grad_norm=BOUND,
        clipping_fn="abadi",
        clipping_style=style,
        clipping_mode=mode,
        accountant="gdp",
        verify="verified" in options,
        **({} if group is None else {"model_parallel_group": group, "model_parallel_parts": told}),
    )
    seeds.give_secret(engine, SECRET)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for logical_batch in engine.batches(dataset, 3):
        for (x,) in logical_batch:
            if kind == "sequence" and group is not None:
                x = x.chunk(group.size(), 1)[dist.get_rank(group)]
            model(x).square().sum((1, 2)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"epsilon": engine.epsilon(), "metrics": engine.metrics()}


def joined(model: Model, group: Any) -> dict[str, Tensor]:
    """The experts of all ranks, and other parameters as each rank has them."""
    found = {}
    for name, p in model.named_parameters():
        parts = [torch.empty_like(p) for _ in range(group.size())]
        dist.all_gather(parts, p.detach(), group=group)
        is_cut = name == "head.weight" and model.group is not None
        found[name] = torch.cat(parts, 1) if is_cut else torch.cat(parts) if ".experts." in name else torch.stack(parts)
    return found


@alone
def train_alone(kind: str, style: str, mode: str) -> dict[str, Any]:
    """Figures of the training in one process, and the parameters that it begins and ends with."""
    model = begun()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    figures = train(model, kind, style, mode, set())
    return {**figures, "before": before, "trained": {name: p.detach() for name, p in model.named_parameters()}}


def begun() -> Model:
    torch.manual_seed(0)
    return Model().double()


def compare(case: str) -> dict[str, Any]:
    seeds.fix(case)
    kind, style, mode = case.split(":")
    mode, *given = mode.split("+")
    chosen = set(given)
    parted = begun()
    group = dist.group.WORLD
    cut(parted, kind, group, chosen)
    model: nn.Module = parted
    if kind == "samples":
        ignored = [name for name, _ in parted.named_parameters() if ".experts." in name and "reduced" not in chosen]
        ignored = [name for name in ignored if ".norm." not in name]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(parted, ignored)
        model = DistributedDataParallel(parted)
    try:
        with ExitStack() as around:
            for fault in chosen & FAULTS.keys():
                around.enter_context(FAULTS[fault]())
            if "digested" not in chosen:
                around.enter_context(taken_for_equal())
            found = train(model, kind, style, mode, chosen, group)
    except DpshardError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    expected = train_alone(kind, style, mode)
    before, trained, parameters = expected["before"], expected["trained"], joined(parted, group)
    change = math.hypot(*(float((p - before[n]).norm()) for n, p in trained.items()))
    return {
        "error": max(float((parameters[n] - p).norm() / change) for n, p in trained.items()),
        "equal": all(bool((x == x[0]).all()) for name, x in parameters.items() if ".experts." not in name),
        **{name: [found[name], expected[name]] for name in ("epsilon", "metrics")},
    }


if __name__ == "__main__":
    main(lambda: [compare(case) for case in sys.argv[1:]])
