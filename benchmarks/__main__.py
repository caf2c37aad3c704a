"""`python -m benchmarks`."""

from benchmarks.cli import app

if __name__ == "__main__":  # processes that are started afresh import this file
    app()
