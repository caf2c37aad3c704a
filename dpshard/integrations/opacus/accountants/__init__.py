"""Opacus's accountants, on the accounting of dpshard: of an engine, and alone."""

from dpshard.integrations.opacus.accountants.alone import GaussianAccountant, IAccountant, PRVAccountant, RDPAccountant
from dpshard.integrations.opacus.accountants.of_engine import Accountant

__all__ = ["Accountant", "GaussianAccountant", "IAccountant", "PRVAccountant", "RDPAccountant"]
