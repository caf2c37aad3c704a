"""Figures of one logical batch, for tuning and debugging. NOT private: epsilon covers none of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpshard.clipping.groups import ClippingGroup

FIGURES = (
    "samples",
    "samples without a finite gradient",
    "samples above the threshold",
    "sum of norms",
    "largest norm",
)
"""Of one group in one micro-batch: sums over samples, and a maximum."""


class BatchMetrics:
    """Sums over the samples of one logical batch."""

    def __init__(self) -> None:
        self.samples = 0
        """Samples of the logical batch, if known."""
        self._groups: dict[str, list[Tensor]] = {}
        self._fresh: dict[str, tuple[float, Tensor, Tensor | None]] = {}  # threshold, norms, padding by group
        self._signal: Tensor | None = None
        self._noise = 0.0
        self._losses: list[Tensor] = []  # sum and number of rows, [2] per micro-batch

    def observe(self, group: ClippingGroup, norm_B: Tensor, is_padding_B: Tensor | None) -> None:
        """Add the norms [B] of one group."""
        if group.label in self._fresh:
            self._take_stock()  # the next micro-batch
        self._fresh[group.label] = (group.threshold, norm_B, is_padding_B)

    def _take_stock(self) -> None:
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
        """Add a micro-batch's loss, a mean or one value per row, without non-finite rows."""
        if loss.dim() == 0:
            rows = torch.ones_like(loss) if is_padding_B is None else (~is_padding_B).sum()
            total = torch.where(rows > 0, loss.double() * rows, 0)  # without samples the loss may be NaN
        else:
            counted_B = loss.isfinite()  # clipping drops the others
            if is_padding_B is not None:
                counted_B &= ~is_padding_B
            rows, total = counted_B.sum(), torch.where(counted_B, loss.double(), 0).sum()
        self._losses.append(torch.stack([total, rows.double()]))

    def observe_sum(self, signal_norm: Tensor, noise_norm: float) -> None:
        """Set the norm [] of the clipped sum and the expected norm of its noise, before division by the batch size."""
        self._signal, self._noise = signal_norm, noise_norm

    def over_ranks(self, labels: Sequence[str], stack: Callable[[Tensor], Tensor]) -> None:
        """Replace the figures by those over all ranks. `stack` gathers the ranks' vectors as rows.

        All ranks pass the labels of all groups, also of unused ones, in one order.
        """
        groups_MF = self._totals(labels)
        seen_M1 = groups_MF.new_ones(len(labels), 1)
        for i, label in enumerate(labels):
            if label not in self._groups:
                seen_M1[i] = 0
        samples = groups_MF.new_full((1,), self.samples)
        figures = torch.cat([torch.cat([groups_MF, seen_M1], 1).flatten(), self._loss(groups_MF.device), samples])
        ranks_WX = stack(figures).cpu()  # the only wait for an accelerator
        groups_WMF = ranks_WX[:, :-3].view(len(ranks_WX), len(labels), -1)
        for label, ranks_WF in zip(labels, groups_WMF.unbind(1), strict=True):
            if ranks_WF[:, -1].any():
                self._groups[label] = [torch.cat([ranks_WF[:, :-2].sum(0), ranks_WF[:, -2:-1].max(0).values])]
        self._losses = [ranks_WX[:, -3:-1].sum(0)]
        self.samples = int(ranks_WX[:, -1].sum())

    def _totals(self, labels: Sequence[str]) -> Tensor:
        """Return FIGURES, float64 [M, F]."""
        self._take_stock()
        device = next((totals[0].device for totals in self._groups.values()), torch.device("cpu"))
        nothing = torch.zeros(1, len(FIGURES), dtype=torch.float64, device=device)
        stacked = [torch.stack(self._groups[label]) if label in self._groups else nothing for label in labels]
        rows = [torch.cat([micro_KF[:, :-1].sum(0), micro_KF[:, -1:].amax(0)]) for micro_KF in stacked]
        return torch.stack(rows) if rows else nothing[:0]

    def _loss(self, device: torch.device) -> Tensor:
        parts = [part.to(device) for part in self._losses]
        return torch.stack(parts).sum(0) if parts else torch.zeros(2, dtype=torch.float64, device=device)

    def unclipped_excess(self, labels: Sequence[str]) -> Tensor:
        """Return (#unclipped - #clipped) / 2 for each group, float64 [M] on the CPU.

        A sample without a finite gradient counts as unclipped. So one sample changes each entry by 1/2, even if others
        decide whether a group runs.
        """
        return self.samples / 2 - self._totals(labels)[:, 2].cpu()

    def summary(self) -> dict[str, float]:
        """Figures by name; see PrivacyEngine.metrics."""
        self._take_stock()
        labels = list(self._groups)
        samples = dropped = clipped = counted = 0.0
        norms: dict[str, float] = {}
        for label, figures in zip(labels, self._totals(labels).tolist(), strict=True):
            real, nonfinite, above, norm_sum, largest = figures
            samples, dropped = max(samples, real), max(dropped, nonfinite)
            clipped, counted = clipped + above, counted + real
            norms[f"grad_norm/{label}"] = norm_sum / max(1.0, real - nonfinite)
            norms[f"grad_norm_max/{label}"] = largest
        signal = 0.0 if self._signal is None else float(self._signal)
        total, rows = self._loss(self._losses[0].device).tolist() if self._losses else (0.0, 0.0)
        return {
            **({"loss": total / rows} if rows else {}),
            "realised_batch_size": samples,
            "nonfinite_samples": dropped,
            "clip_fraction": clipped / max(1.0, counted),
            "gradient_snr": signal / self._noise if self._noise > 0 else float("inf") if signal else 0.0,
            "clipped_sum_norm": signal,
            **norms,
        }
