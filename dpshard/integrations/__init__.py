"""dpshard in other frameworks, and under other libraries' interfaces.

They may import the public package, `accounting`, `config`, `losses`, `replacements`, `sampling` and `step`;
`sklearn.py` also `applications.tabular`, `applications.advice` and `applications.extras`. Begin with `transformers.py`.
"""
