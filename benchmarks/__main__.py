"""`python -m benchmarks`."""

from benchmarks.cli import app

if __name__ == "__main__":  # spawned processes import this file
    app()
