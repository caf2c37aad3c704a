"""Figures of one logical batch, for tuning and debugging: NOT private. None of it is covered by epsilon."""

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
"""Figures of one group in one micro-batch: sums over samples, and a maximum at the end."""


class BatchMetrics:
    """Sums over the samples of one logical batch, on the device until a method reads them."""

    def __init__(self) -> None:
        self.samples = 0
        """Samples of the logical batch, if known, with those without any backward."""
        self._groups: dict[str, list[Tensor]] = {}
        self._fresh: dict[str, tuple[float, Tensor, Tensor | None]] = {}  # threshold, norms, padding per group
        self._signal: Tensor | None = None
        self._noise = 0.0
        self._losses: list[tuple[Tensor, float]] = []

    def observe(self, group: ClippingGroup, norm_B: Tensor, is_padding_B: Tensor | None) -> None:
        """Add the norms [B] of one group in one micro-batch."""
        if group.label in self._fresh:
            self._take_stock()  # this is the next micro-batch
        self._fresh[group.label] = (group.threshold, norm_B, is_padding_B)

    def _take_stock(self) -> None:
        """Reduce the norms of a micro-batch to FIGURES, in one operation for hundreds of groups."""
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
        """Add the loss of one micro-batch: a mean over its rows, or one value per row. Skip non-finite rows."""
        if loss.dim() == 0:
            rows = 1 if is_padding_B is None else int((~is_padding_B).sum())
            total = loss * rows
        else:
            real = loss if is_padding_B is None else loss[~is_padding_B.to(loss.device)]
            real = real[real.isfinite()]  # clipping drops and counts the other samples
            rows, total = len(real), real.sum()
        if rows:  # without samples the loss may be NaN
            self._losses.append((total, float(rows)))

    def observe_sum(self, signal_norm: Tensor, noise_norm: float) -> None:
        """Set the norms of the clipped sum [] and (expected) of its noise, both before division by the batch size."""
        self._signal, self._noise = signal_norm, noise_norm

    def over_ranks(self, labels: Sequence[str], stack: Callable[[Tensor], Tensor]) -> None:
        """Replace the figures by those of all ranks; `stack` gathers the vectors of all ranks as rows.

        Every rank must pass the labels of all groups, in one order, even of groups that it has not used.
        """
        self._take_stock()
        nothing = torch.zeros(len(FIGURES), dtype=torch.float64, device="cpu")
        rows = []
        for label in labels:
            stacked = torch.stack(self._groups.get(label, [nothing]))
            seen = torch.full_like(stacked[0, :1], len(self._groups.get(label, [])))
            rows.append(torch.cat([stacked[:, :-1].sum(0), stacked[:, -1:].max(0).values, seen]).cpu())
        own = torch.stack(
            [torch.as_tensor(total, dtype=torch.float64, device="cpu") for total, _ in self._losses] or [nothing[0]]
        )
        rows_of_losses = sum((n for _, n in self._losses), 0.0)
        losses = torch.stack([own.sum(), torch.tensor(rows_of_losses, dtype=torch.float64, device="cpu")])
        samples = torch.tensor([self.samples], dtype=torch.float64, device="cpu")
        ranks_WX = stack(torch.cat([*rows, losses, samples])).cpu()
        groups_WGF = ranks_WX[:, :-3].view(len(ranks_WX), len(labels), -1)
        for label, ranks_WF in zip(labels, groups_WGF.unbind(1), strict=True):
            if ranks_WF[:, -1].any():
                self._groups[label] = [torch.cat([ranks_WF[:, :-2].sum(0), ranks_WF[:, -2:-1].max(0).values])]
        total, count, everyone = ranks_WX[:, -3:].sum(0)
        self.samples = int(everyone)
        self._losses = [(total, float(count))] if count else []

    def unclipped_excess(self, labels: Sequence[str]) -> Tensor:
        """Return (#unclipped - #clipped) / 2 for each group of `labels`, float64 [M] on the CPU.

        A sample without a finite gradient in the group counts as unclipped, so one sample always changes each entry by
        1/2, whether or not other samples decide that a group runs (experts, a branch).
        """
        self._take_stock()
        nothing = [torch.zeros(len(FIGURES), dtype=torch.float64, device="cpu")]
        above_M = torch.stack([torch.stack(self._groups.get(label, nothing)).sum(0)[2].cpu() for label in labels])
        return self.samples / 2 - above_M

    def summary(self) -> dict[str, float]:
        """Return the figures by name; see PrivacyEngine.metrics."""
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
