"""Replacements for layers that have no per-sample gradient."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dpshard.errors import UnsupportedParameterError

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_GROUPS = 32
"""Wu & He 2018, arXiv:1803.08494."""


def replace_unsupported(model: nn.Module) -> dict[str, str]:
    """Replace, in place, the layers of `model` that mix samples or write data into buffers; call it before the engine.

    - BatchNorm and SyncBatchNorm become GroupNorm, with at most 32 groups of two or more channels.
      BatchNorm1d, whose input may be [B, C], becomes one group. Eps and parameter objects stay, running statistics go:
      a trained model needs further training.
    - InstanceNorm stops tracking running statistics.
    - Sparse Embedding and EmbeddingBag get dense gradients, because noise reaches every row.

    Returns the changes by layer: {"features.1": "BatchNorm2d -> GroupNorm(32, 64)"}. Raises UnsupportedParameterError
    for a subclass of BatchNorm, and for a model that is itself one.
    """
    done: dict[str, str] = {}
    new: dict[nn.Module, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        before = type(module).__name__
        if isinstance(module, _BatchNorm):
            if type(module) not in _BATCH_NORMS or not name:
                raise UnsupportedParameterError(
                    f"{name or 'the model'} ({before}) cannot be replaced for you: it may do more than normalise. "
                    f"Build the model with another normalisation layer, such as torch.nn.GroupNorm."
                )
            if module not in new:
                new[module] = _group_norm(module)
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, new[module])
            group_norm = new[module]
            done[name] = f"{before} -> GroupNorm({group_norm.num_groups}, {group_norm.num_channels})"
        elif isinstance(module, _InstanceNorm) and module.track_running_stats:
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
            done[name] = f"{before} -> {before}(track_running_stats=False)"
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            module.sparse = False
            done[name] = f"{before} -> {before}(sparse=False)"
    return done


def _group_norm(norm: _BatchNorm) -> nn.GroupNorm:
    channels = norm.num_features
    # A group of one channel with one position would be constant.
    most = 1 if isinstance(norm, nn.BatchNorm1d) else max(1, min(_GROUPS, channels // 2))
    groups = max(g for g in range(1, most + 1) if channels % g == 0)
    group_norm = nn.GroupNorm(groups, channels, norm.eps, affine=False)
    if norm.affine:
        group_norm.affine, group_norm.weight, group_norm.bias = True, norm.weight, norm.bias
    return group_norm.train(norm.training)
