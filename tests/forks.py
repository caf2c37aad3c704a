"""Processes that have imported torch already: they are forked from one that did nothing else (`warm.py`).

The imports of a rank take longer than most tests of ranks. What forks must have no threads of torch, so it never runs a
model; pytest's own process has them. Forked processes share the order in which sets are iterated, unlike those that
`torchrun` starts: some tests start ranks by `torchrun`.
"""

import contextlib
import fcntl
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.warm"])

Command = Sequence[str | Path]


class Forked:
    """The part of subprocess.Popen that tests and the launcher of `dpshard train` use.

    `command` is [sys.executable, SCRIPT, ...], with "-m", MODULE or "-c", CODE possible in place of SCRIPT. Imported
    modules have read the environment when the tests were started, not later.
    """

    def __init__(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
    ) -> None:
        assert stdin in (None, subprocess.DEVNULL)  # as all processes of multiprocessing
        stdout = 1 if stdout is None else stdout
        stderr = 2 if stderr is None else stdout if stderr == subprocess.STDOUT else stderr
        kept = _Kept({1: stdout, 2: stderr, **{fd: fd for fd in pass_fds}})
        environment = dict(os.environ if env is None else env)
        arguments = [str(argument) for argument in command[1:]]
        sys.stdout.flush()
        self._process = _CONTEXT.Process(
            target=_run, args=(arguments, environment, os.getcwd(), kept, start_new_session), daemon=False
        )
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended in between
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Branched:
    """Like Forked, but forked from this process, which must not have run a model: the launcher in a Forked process."""

    def __init__(
        self,
        command: Command,
        *,
        env: Mapping[str, str],
        stdin: int,
        pass_fds: Sequence[int],
        start_new_session: bool,
    ) -> None:
        assert stdin == subprocess.DEVNULL
        self.returncode: int | None = None
        arguments = [str(argument) for argument in command[1:]]
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            _run(arguments, dict(env), os.getcwd(), _Passed(pass_fds), start_new_session)

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        return self._reap(0)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended in between
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Passed:
    """Descriptors of a branch; it closes the others, as a new interpreter does."""

    def __init__(self, passed: Sequence[int]) -> None:
        self.passed = passed

    def move(self) -> None:
        last = 2
        for fd in sorted(self.passed):
            os.closerange(last + 1, fd)
            last = fd
        os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))


class _Kept:
    """Descriptors of the process, by their numbers there."""

    def __init__(self, numbers: dict[int, int]) -> None:
        self.numbers = numbers

    def __getstate__(self) -> dict[int, Any]:
        return {there: DupFd(here) for there, here in self.numbers.items()}

    def __setstate__(self, state: dict[int, Any]) -> None:
        self.numbers = {there: here.detach() for there, here in state.items()}

    def move(self) -> None:
        """Move them out of each other's way, then to their numbers."""
        away = {there: fcntl.fcntl(here, fcntl.F_DUPFD, 200) for there, here in self.numbers.items()}
        for here in self.numbers.values():
            os.close(here)
        for there, here in away.items():
            os.dup2(here, there)
            os.close(here)


def _run(
    arguments: list[str], environment: dict[str, str], folder: str, kept: _Kept | _Passed, new_session: bool
) -> None:
    code = 1
    try:
        kept.move()
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
        if new_session:
            os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        _start(arguments)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)  # threads of gloo may outlive the group, and abort an ordinary exit


def _start(arguments: list[str]) -> None:
    """Do what an interpreter does with these arguments."""
    import torch

    from tests import seeds

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    seeds.fix(seeds.current_test())
    sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ImportError):
        import sitecustomize  # noqa: F401  # type: ignore[import-not-found]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, os.getcwd())
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
