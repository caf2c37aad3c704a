"""Opacus's accountants, of an engine and without one."""

from dpshard.integrations.opacus.accountants.accountant import (
    Accountant,
    GaussianAccountant,
    IAccountant,
    PRVAccountant,
    RDPAccountant,
    create_accountant,
)

__all__ = ["Accountant", "GaussianAccountant", "IAccountant", "PRVAccountant", "RDPAccountant", "create_accountant"]
