"""What a logical batch looked like from inside: for tuning and debugging. None of it is covered by epsilon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpshard.clipping.functions import ClippingGroup

FIGURES = (
    "samples",
    "samples without a finite gradient",
    "samples above the threshold",
    "sum of norms",
    "largest norm",
)
"""Of a group and a micro-batch. All are sums over samples, but for the last one."""


class BatchMetrics:
    """Sums over the samples of one logical batch, kept on the device and read only when they are asked for."""

    def __init__(self) -> None:
        self.samples = 0
        """Samples of the logical batch, if that is known: also those that a group, or any backward, did not reach."""
        self._groups: dict[str, list[Tensor]] = {}
        self._fresh: dict[str, tuple[float, Tensor, Tensor | None]] = {}  # of a micro-batch: threshold, norms, padding
        self._signal: Tensor | None = None
        self._noise = 0.0
        self._losses: list[tuple[Tensor, float]] = []

    def observe(self, group: ClippingGroup, norm_B: Tensor, is_padding_B: Tensor | None) -> None:
        """Take the norms [B] of one group and micro-batch."""
        if group.label in self._fresh:
            self._take_stock()  # the next micro-batch has begun
        self._fresh[group.label] = (group.threshold, norm_B, is_padding_B)

    def _take_stock(self) -> None:
        """Turn the norms of a micro-batch into figures, of all groups at once: there may be hundreds."""
        alike: dict[Any, list[str]] = {}
        for label, (threshold, norm_B, is_padding_B) in self._fresh.items():
            alike.setdefault((threshold, norm_B.shape, norm_B.device, id(is_padding_B)), []).append(label)
        for (threshold, *_), labels in alike.items():
            norm_MB = torch.stack([self._fresh[label][1].double() for label in labels])
            is_padding_B = self._fresh[labels[0]][2]
            real_MB = torch.ones_like(norm_MB, dtype=torch.bool)
            if is_padding_B is not None:
                real_MB &= ~is_padding_B
            finite_MB = real_MB & torch.isfinite(norm_MB)
            finite_norm_MB = torch.where(finite_MB, norm_MB, 0)
            totals_MF = torch.stack(  # FIGURES
                [
                    real_MB.sum(1).double(),
                    (real_MB & ~finite_MB).sum(1).double(),
                    (finite_norm_MB > threshold).sum(1).double(),
                    finite_norm_MB.sum(1),
                    finite_norm_MB.amax(1),
                ],
                dim=1,
            )
            for label, totals_F in zip(labels, totals_MF.unbind(), strict=True):
                self._groups.setdefault(label, []).append(totals_F)
        self._fresh.clear()

    def add_loss(self, loss: Tensor, is_padding_B: Tensor | None) -> None:
        """Take the loss of one micro-batch: a mean over its rows, or one value a row, of which finite ones count."""
        if loss.dim() == 0:
            rows = 1 if is_padding_B is None else int((~is_padding_B).sum())
            total = loss * rows
        else:
            real = loss if is_padding_B is None else loss[~is_padding_B.to(loss.device)]
            real = real[real.isfinite()]  # the other samples are dropped, and counted
            rows, total = len(real), real.sum()
        if rows:  # the loss of padding alone may be NaN
            self._losses.append((total, float(rows)))

    def observe_sum(self, signal_norm: Tensor, noise_norm: float) -> None:
        """Take the norms of the clipped sum (a scalar tensor) and, expected, of its noise; both before the division."""
        self._signal, self._noise = signal_norm, noise_norm

    def over_ranks(self, labels: Sequence[str], stack: Callable[[Tensor], Tensor]) -> None:
        """Make these the figures of all ranks: `stack` gives the vectors of all of them as rows.

        All ranks hand over the same `labels`, those of all groups, for some may not have met a group at all.
        """
        self._take_stock()
        nothing = torch.zeros(len(FIGURES), dtype=torch.float64)
        rows = []
        for label in labels:
            stacked = torch.stack(self._groups.get(label, [nothing]))
            seen = torch.full_like(stacked[0, :1], len(self._groups.get(label, [])))
            rows.append(torch.cat([stacked[:, :-1].sum(0), stacked[:, -1:].max(0).values, seen]).cpu())
        own = torch.stack(
            [torch.as_tensor(total, dtype=torch.float64).cpu() for total, _ in self._losses] or [nothing[0]]
        )
        losses = torch.stack([own.sum(), torch.tensor(sum((n for _, n in self._losses), 0.0), dtype=torch.float64)])
        samples = torch.tensor([self.samples], dtype=torch.float64)
        ranks_WX = stack(torch.cat([*rows, losses, samples])).cpu()
        groups_WGF = ranks_WX[:, :-3].view(len(ranks_WX), len(labels), -1)
        for label, ranks_WF in zip(labels, groups_WGF.unbind(1), strict=True):
            if ranks_WF[:, -1].any():
                self._groups[label] = [torch.cat([ranks_WF[:, :-2].sum(0), ranks_WF[:, -2:-1].max(0).values])]
        total, count, everyone = ranks_WX[:, -3:].sum(0)
        self.samples = int(everyone)
        self._losses = [(total, float(count))] if count else []

    def unclipped_excess(self, labels: Sequence[str]) -> Tensor:
        """Sum over the samples of b - 1/2 for each group of `labels`, float64 [M] on the CPU.

        b is 0 for a norm above the threshold, else 1. One sample changes each entry by 1/2: whether a group runs at all
        may depend on the other samples of a micro-batch (experts, a branch), and so may whether the gradient of a
        sample there is zero, not finite, or nothing. All of these are alike, with b = 1.
        """
        self._take_stock()
        nothing = [torch.zeros(len(FIGURES), dtype=torch.float64)]
        above_M = torch.stack([torch.stack(self._groups.get(label, nothing)).sum(0)[2].cpu() for label in labels])
        return self.samples / 2 - above_M

    def summary(self) -> dict[str, float]:
        """See PrivacyEngine.metrics."""
        self._take_stock()
        samples = dropped = clipped = counted = 0.0
        norms: dict[str, float] = {}
        for label, totals in self._groups.items():
            stacked = torch.stack(totals)
            real, nonfinite, above, norm_sum = (float(x) for x in stacked[:, :4].sum(0))
            samples, dropped = max(samples, real), max(dropped, nonfinite)
            clipped, counted = clipped + above, counted + real
            norms[f"grad_norm/{label}"] = norm_sum / max(1.0, real - nonfinite)
            norms[f"grad_norm_max/{label}"] = float(stacked[:, 4].max())
        signal = 0.0 if self._signal is None else float(self._signal)
        rows = sum(count for _, count in self._losses)
        loss = {"loss": float(sum(total for total, _ in self._losses)) / rows} if rows else {}
        return {
            **loss,
            "realised_batch_size": samples,
            "nonfinite_samples": dropped,
            "clip_fraction": clipped / max(1.0, counted),
            "gradient_snr": signal / self._noise if self._noise > 0 else float("inf") if signal else 0.0,
            "clipped_sum_norm": signal,
            **norms,
        }
