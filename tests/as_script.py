"""Runs a script, and leaves at once: torchrun as_script.py SCRIPT ARGUMENTS.

A thread of gloo that drops the tensors of the last collective while Python shuts down aborts the process (torch's issue
190489). The script is done by then.
"""

import os
import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    os._exit(0)
