"""Opacus's Poisson sampler, which scripts import and seldom use."""

from __future__ import annotations

from typing import Any, NoReturn

from dpshard.errors import ConfigurationError


class UniformWithReplacementSampler:
    """Refused: the engine draws the samples."""

    def __new__(cls, *args: Any, **options: Any) -> NoReturn:
        """Raise ConfigurationError."""
        raise ConfigurationError(
            f"{cls.__name__} draws without an engine, which would account for it. Pass your DataLoader to "
            f"PrivacyEngine().make_private(data_loader=...), and iterate over the loader that it returns."
        )


class DistributedUniformWithReplacementSampler(UniformWithReplacementSampler):
    """Refused: the engine draws the samples."""
