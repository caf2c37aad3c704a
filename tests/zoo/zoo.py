"""Compare a whole model with the oracle: one private step, the model untouched, in two clipping styles.

Many models compute parts of themselves in float32 whatever their dtype (`hidden_states.to(torch.float32)` in every
RMSNorm). Under such rounding, 1e-7, an error of 1e-8 would not show: so `Wide` makes these casts float64, for the
oracle and for the private step alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpshard.interception import layouts
from dpshard.interception.batch_dims import Layout, find_layout
from tests.oracle import TOLERANCE, clipped_mean, norm, per_sample_gradients, private_step, relative_error
from tests.zoo import page

B = 3
VOCABULARY = 20
SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
}
"""Common names for model sizes in transformers' configurations."""
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tokens(length: int = 5) -> Tensor:
    """Return token ids [B, length] without special ones."""
    return torch.randint(3, VOCABULARY, (B, length))


def images(size: int = 8) -> Tensor:
    """Images [B, 3, size, size]."""
    return torch.randn(B, 3, size, size)


def logits(output: Any) -> Tensor:
    """Return the common output of transformers' models."""
    return output.logits


class Wide(TorchFunctionMode):
    """Uses float64 where a model asks for float32, and for grouped products, for which torch has no such kernel."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in kwargs.items()}
        if func in (F.grouped_mm, torch._grouped_mm) and args[0].dtype == torch.float64:
            bounds = [0, *kwargs["offs"].tolist()]
            return torch.cat([args[0][a:b] @ w for a, b, w in zip(bounds, bounds[1:], args[1], strict=False)])
        return func(*args, **kwargs)


class OnRows(nn.Module):
    """The model as a function of sample numbers, for the oracle."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor], read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.inputs, self.read = inputs, read
        self.model = [model]  # no submodule: the parameters keep their names
        self.buffers_before = {name: x.clone() for name, x in model.named_buffers()}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model[0].named_parameters(*args, **kwargs)

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            for name, x in self.model[0].named_buffers():
                x.copy_(self.buffers_before[name])  # spectral_norm takes another step at every call
        # Tensors with another number of rows belong to all samples.
        taken = {name: x[rows] if len(x) == B else x for name, x in self.inputs.items()}
        return self.read(self.model[0](**taken))


@contextmanager
def functions_met() -> Iterator[set[str]]:
    """Yield a set that collects, from layouts, the names of functions in which parameters meet samples."""
    met: set[str] = set()

    def find(*args: Any, **kwargs: Any) -> Layout:
        layout = find_layout(*args, **kwargs)
        met.update(str(key[0]).strip("_") for key, call in layout.items() if key[0] != "rows" and not call.derives)
        return layout

    with mock.patch.object(layouts, "find_layout", find):
        yield met


def assert_model_exact(
    model: nn.Module, inputs: Mapping[str, Tensor], read: Callable[[Any], Tensor] = logits, **options: Any
) -> float:
    """Assert that one private step in either style is the oracle's, with some samples clipped; return the worst error.

    Only the first style verifies the model.
    """
    model = model.double().train()
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    with torch.no_grad():
        for parameter in model.parameters():  # biases of 0 and scales of 1 would hide that they are used
            parameter.add_(0.2 * torch.randn_like(parameter))
    call, rows = OnRows(model, inputs, read), torch.arange(B)
    worst = 0.0
    with Wide(), functions_met() as met:
        per_sample = per_sample_gradients(call, (rows,))
        norms = sorted(norm(gradients) for gradients in per_sample)
        assert norms[0] > 0
        R = norms[B // 2] * 0.999
        layers: dict[str, list[str]] = {}
        for name in per_sample[0]:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        for style, groups in (("all-layer", None), ("layer-wise", list(layers.values()))):
            expected = clipped_mean(per_sample, max_grad_norm=R, batch_size=B, groups=groups)
            once = {"verify": groups is None, "clipping_style": style, "max_grad_norm": R}
            update = private_step(model, (rows,), call=call, **{**once, **options})
            error = relative_error(update, expected)
            assert error <= TOLERANCE, f"{style}: relative error {error:.2e}"
            worst = max(worst, error)
    page.note(model, met, worst)
    return worst
