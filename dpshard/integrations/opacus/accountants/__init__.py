"""Opacus's accountants, of an engine and without one."""

from dpshard.integrations.opacus.accountants.alone import GaussianAccountant, IAccountant, PRVAccountant, RDPAccountant
from dpshard.integrations.opacus.accountants.of_engine import Accountant

__all__ = ["Accountant", "GaussianAccountant", "IAccountant", "PRVAccountant", "RDPAccountant"]
