"""`python -m dpshard`: the command line, for launchers such as `torchrun -m dpshard train ...`."""

from dpshard.applications.cli import app

if __name__ == "__main__":
    app()
