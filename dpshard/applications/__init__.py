"""Applications: command line, advice, planner, audit, benchmark. Begin with `cli/__init__.py`.

May import all rooms below; no other room imports them, except `integrations`.
"""
