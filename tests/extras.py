"""What some tests need beside the bare package."""

from importlib.util import find_spec

import pytest

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="pip install dpshard[deepspeed]")
