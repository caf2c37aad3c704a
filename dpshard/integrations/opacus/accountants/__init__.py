"""Opacus's accountants, of an engine and without one."""

from dpshard.integrations.opacus.accountants.alone import (
    GaussianAccountant,
    IAccountant,
    PRVAccountant,
    RDPAccountant,
    create_accountant,
)
from dpshard.integrations.opacus.accountants.of_engine import Accountant

__all__ = ["Accountant", "GaussianAccountant", "IAccountant", "PRVAccountant", "RDPAccountant", "create_accountant"]
