"""dpshard beside ordinary training and its peers: `python -m benchmarks --help`; docs/benchmarks.md says how and why.

Run it from the root of the repository: Opacus installs a package `benchmarks` of its own.
"""
