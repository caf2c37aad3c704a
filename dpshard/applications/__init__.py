"""Applications on the library: command line, planner, audit, benchmark.

They may import every room below; no room imports them. Users import `dpshard.audit` and `dpshard.planner`. Begin with
`cli/__init__.py`.
"""
