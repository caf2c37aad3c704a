"""Applications on the library: command line, advice, planner, audit, benchmark.

They may import every room below; no room imports them. Users import `dpshard.advise`, `dpshard.audit` and
`dpshard.planner`. Begin with `cli/__init__.py`.
"""
