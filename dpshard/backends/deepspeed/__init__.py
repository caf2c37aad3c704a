"""DeepSpeed's ZeRO stages 1, 2 and 3 as a back-end. Begin with the note in `backend.py`.

Imports nothing: `config.py` and `linear.py` run without DeepSpeed.
"""
