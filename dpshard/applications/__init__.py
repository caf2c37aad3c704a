"""Applications: command line, advice, planner, audit, benchmark. Begin with `cli/__init__.py`."""
