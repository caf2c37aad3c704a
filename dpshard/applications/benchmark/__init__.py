"""Measurement of training steps."""

from dpshard.applications.benchmark.comparison import Comparison, Measured, compare
from dpshard.applications.benchmark.subject import Subject, load
from dpshard.applications.benchmark.timing import Spread, interleave, paired_ratio
from dpshard.applications.benchmark.training import Batch, NonPrivate, Privacy, Private
