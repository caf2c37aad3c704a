"""Advice: where to start a private run, from the size of the data and the budget.

`starts.py`: numbers of the literature and of our sweep, each with its source. `trade_offs.py`: sigma over the expected
batch against compute, by the accountant. `advice.py`: the advice. `paste.py`: its command and code. Imports no torch.
"""

from dpshard.applications.advice.advice import Advice, advise
from dpshard.applications.advice.starts import Reason
from dpshard.applications.advice.trade_offs import TradeOff

__all__ = ["Advice", "Reason", "TradeOff", "advise"]
