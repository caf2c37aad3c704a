"""dpshard in other frameworks and under other libraries' interfaces.

Import each by its own name.
"""
