"""DeepSpeed's ZeRO stages 1, 2 and 3 as a back-end. Begin with the note in `gradients.py`.

Imports nothing: `config.py` runs without DeepSpeed.
"""
