"""Tables. Errors name columns and places, never a value of a row."""

from dpshard.applications.tabular.columns import Column, parse_columns
from dpshard.applications.tabular.encoding import Encoder, fit_privately
from dpshard.applications.tabular.networks import make_network
from dpshard.applications.tabular.objectives import Classes, Numbers, Objective
from dpshard.applications.tabular.statistics import balanced, noise_for, private_statistics
