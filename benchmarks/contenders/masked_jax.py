"""Masked DP-SGD in JAX, after Algorithm 2 of Rodriguez Beltran et al. 2024, arXiv:2406.17298, and SGD in JAX.

Physical batches are always full, and a mask removes the rows that were not drawn, so that nothing is compiled twice.
The logical batch is one physical batch here. The mask selects rather than multiplies: 0 times infinity is NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders.contender import Contender, Task
from benchmarks.contenders.extras import needed
from benchmarks.feed import PoissonFeed
from dpshard.applications.benchmark import Batch
from dpshard.config import require_choice


class Jax(Contender):
    """JAX, compiled: `masked` DP-SGD, or `nonprivate` SGD."""

    in_torch = False

    def __init__(self, task: Task, mode: str = "masked") -> None:
        require_choice("jax", mode, ["masked", "nonprivate"])
        needed("jax", extra="jax")
        import jax

        if task.dtype is torch.float64:
            jax.config.update("jax_enable_x64", True)
        self._jax, self.is_private = jax, mode == "masked"
        subject = replace(task, device="cpu").subject()
        self._feed = PoissonFeed(subject.x, subject.y, task.workload.batch)
        self._device = jax.devices("cpu" if task.device == "cpu" else None)[0]
        self._parameters = {name: self._array(p.detach()) for name, p in subject.model.named_parameters()}
        self._key = jax.random.key(0)
        self._step = jax.jit(_private(task) if self.is_private else _ordinary(task), donate_argnums=0)

    def _array(self, x: Tensor) -> Any:
        return self._jax.device_put(x.numpy().copy(), self._device)

    def step(self) -> Batch:
        batch = self._feed.draw()
        self._key, key = self._jax.random.split(self._key)
        arrays = (self._array(batch.x), self._array(batch.y), self._array(~batch.is_padding))
        self._parameters = self._step(self._parameters, *arrays, key)
        self._jax.block_until_ready(self._parameters)
        return batch

    def parameters(self) -> dict[str, Tensor]:
        import numpy as np

        return {name: torch.from_numpy(np.array(p)) for name, p in self._parameters.items()}


def _private(task: Task) -> Any:
    import jax
    import jax.numpy as jnp

    from benchmarks.contenders import jax_models

    gradient = jax.vmap(jax.grad(jax_models.loss(task.workload)), in_axes=(None, 0, 0))
    std, lr, expected = task.noise_multiplier * task.threshold, task.lr, task.expected_batch

    def step(p: Any, x: Any, y: Any, is_sample_B: Any, key: Any) -> Any:
        per_sample = gradient(p, x, y)
        norm_sq_B = sum(jnp.square(g.reshape(len(g), -1)).sum(1) for g in per_sample.values())
        clip_coef_B = jnp.where(is_sample_B, jnp.minimum(1.0, task.threshold / jnp.sqrt(norm_sq_B)), 0.0)
        keys = dict(zip(p, jax.random.split(key, len(p)), strict=True))

        def updated(name: str) -> Any:
            total = jnp.tensordot(clip_coef_B.astype(p[name].dtype), per_sample[name], 1)
            noise = std * jax.random.normal(keys[name], p[name].shape, p[name].dtype)
            return p[name] - lr * (total + noise) / expected

        return {name: updated(name) for name in p}

    return step


def _ordinary(task: Task) -> Any:
    import jax

    from benchmarks.contenders import jax_models

    each = jax.vmap(jax_models.loss(task.workload), in_axes=(None, 0, 0))
    gradient = jax.grad(lambda p, x, y: each(p, x, y).mean())

    def step(p: Any, x: Any, y: Any, is_sample_B: Any, key: Any) -> Any:
        del is_sample_B, key  # it trains also on rows that were not drawn: B rows, as in torch
        return jax.tree.map(lambda w, g: w - task.lr * g, p, gradient(p, x, y))

    return step
