"""The workloads' models in JAX, on the parameters of the torch ones, under their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads import Workload

Array = Any
Parameters = Mapping[str, Array]


def scores(workload: Workload) -> Callable[[Parameters, Array], Array]:
    """Return the model: a function of parameters and the input of one sample."""
    forwards = {"gpt": _gpt, "vit": _vit, "cnn": _cnn, "mlp": _mlp}
    forward, sizes = forwards[workload.family], workload.sizes
    return lambda p, x: forward(p, x, sizes)


def loss(workload: Workload) -> Callable[[Parameters, Array, Array], Array]:
    """Return the cross-entropy of one sample, a mean over its positions, as a function."""
    model = scores(workload)

    def value(p: Parameters, x: Array, y: Array) -> Array:
        log_p = jax.nn.log_softmax(model(p, x), axis=-1)
        return -jnp.take_along_axis(log_p, y[..., None], axis=-1).mean()

    return value


def _linear(p: Parameters, name: str, x: Array) -> Array:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def _layer_norm(p: Parameters, name: str, x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    return normed * p[f"{name}.weight"] + p[f"{name}.bias"]


def _block(p: Parameters, name: str, x_TD: Array, heads: int, *, causal: bool) -> Array:
    T, D = x_TD.shape
    qkv = _linear(p, f"{name}.qkv", _layer_norm(p, f"{name}.norm_1", x_TD)).reshape(T, 3, heads, D // heads)
    q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
    y_THK = jax.nn.dot_product_attention(q, k, v, is_causal=causal)
    x_TD = x_TD + _linear(p, f"{name}.out", y_THK.reshape(T, D))
    h = jax.nn.gelu(_linear(p, f"{name}.up", _layer_norm(p, f"{name}.norm_2", x_TD)), approximate=False)
    return x_TD + _linear(p, f"{name}.down", h)


def _gpt(p: Parameters, ids_T: Array, sizes: Mapping[str, Any]) -> Array:
    x_TD = p["tokens.weight"][ids_T] + p["positions.weight"][: len(ids_T)]
    for i in range(sizes["layers"]):
        x_TD = _block(p, f"blocks.{i}", x_TD, sizes["heads"], causal=True)
    head = p["tokens.weight"] if sizes["tied"] else p["head.weight"]
    return _layer_norm(p, "norm", x_TD) @ head.T


def _vit(p: Parameters, image: Array, sizes: Mapping[str, Any]) -> Array:
    side = sizes["patch"]
    x = _convolution(p, "patches", image, stride=side, padding=0)
    x_TD = jnp.concatenate([p["start.token"][0], x.reshape(len(x), -1).T]) + p["start.positions"][0]
    for i in range(sizes["layers"]):
        x_TD = _block(p, f"blocks.{i}", x_TD, sizes["heads"], causal=False)
    return _linear(p, "head", _layer_norm(p, "norm", x_TD)[0])


def _convolution(p: Parameters, name: str, x_CHW: Array, *, stride: int, padding: int) -> Array:
    y = jax.lax.conv_general_dilated(
        x_CHW[None], p[f"{name}.weight"], (stride, stride), [(padding, padding)] * 2,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )  # fmt: skip
    return y[0] + p[f"{name}.bias"][:, None, None]


def _cnn(p: Parameters, x_CHW: Array, sizes: Mapping[str, Any]) -> Array:
    for layer, stride in enumerate((1, 1, 2, 1, 2, 1)):
        x_CHW = _convolution(p, f"{3 * layer}", x_CHW, stride=stride, padding=1)
        grouped = x_CHW.reshape(8, -1)
        centred = grouped - grouped.mean(1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.square(centred).mean(1, keepdims=True) + 1e-5)
        weight, bias = p[f"{3 * layer + 1}.weight"], p[f"{3 * layer + 1}.bias"]
        x_CHW = jax.nn.relu(normed.reshape(x_CHW.shape) * weight[:, None, None] + bias[:, None, None])
    return _linear(p, "20", x_CHW.mean((1, 2)))


def _mlp(p: Parameters, x: Array, sizes: Mapping[str, Any]) -> Array:
    return _linear(p, "2", jax.nn.relu(_linear(p, "0", x)))
