"""Applications: command line, training on tables, advice, planner, audit, benchmark. Begin with `cli/__init__.py`.

May import all rooms below; no other room imports them, except `integrations`.
"""
