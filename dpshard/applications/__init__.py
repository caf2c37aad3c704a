"""Applications that stand on the library: command line, planner, audit, benchmark.

They may import every room below; no room imports them. Users import `dpshard.audit` and `dpshard.planner`, the public
names of two of them. Begin with `cli/__init__.py`, which lists the commands, or with the `__init__` of one application.
"""
