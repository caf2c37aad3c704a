"""VaultGemma's published settings: what they cost by this accountant, on the command line."""

import json

import pytest
from torch import nn

from dpshard import PrivacyEngine
from dpshard.errors import ConfigurationError
from dpshard.recipes import VAULT_GEMMA


@pytest.mark.parametrize(("accountant", "epsilon"), [("pld", 2.0687), ("rdp", 3.4087)])
@pytest.mark.exhaustive
def test_what_vault_gemma_costs(dpshard, accountant, epsilon):
    """Published: epsilon 2.0 at delta 1.1e-10.

    For the number of sequences assumed here, a plain composition in long doubles finds 2.0686 on the same grid.
    """
    settings = VAULT_GEMMA.engine_settings()
    arguments = [x for name, value in settings.items() for x in (f"--{name.replace('_', '-')}", value)]
    (answer,) = json.loads(dpshard("account", *arguments, "--accountant", accountant, "--json").stdout)["answers"]
    assert answer["epsilon"] == pytest.approx(epsilon, abs=0.0005)


def test_a_smaller_run():
    recipe = VAULT_GEMMA.scaled(sample_size=10_000, batch_size=64, steps=10)
    assert recipe.noise_multiplier == 0.614
    engine = PrivacyEngine(nn.Linear(2, 2), **recipe.engine_settings(truncated=True))
    assert engine.mechanism.max_batch_size == 112
    with pytest.raises(ConfigurationError, match="positive"):
        VAULT_GEMMA.scaled(sample_size=0, batch_size=64, steps=10)
