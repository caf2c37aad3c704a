"""dpshard in other frameworks and under other libraries' interfaces; import each by its own name."""
