"""dpshard in other frameworks, and under other libraries' interfaces.

Import each by its own name. May import the public face of the package, and `sampling`, `losses`, `config` and `step`.
Begin with `transformers.py`.
"""
