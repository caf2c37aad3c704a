"""Where to start a private run; imports no torch."""

from dpshard.applications.advice.advice import Advice, advise
