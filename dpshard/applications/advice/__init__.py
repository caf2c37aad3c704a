"""Where to start a private run; imports no torch."""

from dpshard.applications.advice.advice import Advice, advise
from dpshard.applications.advice.starts import Reason
from dpshard.applications.advice.trade_offs import TradeOff

__all__ = ["Advice", "Reason", "TradeOff", "advise"]
