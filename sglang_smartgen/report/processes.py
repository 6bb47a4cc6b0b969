"""Child processes that leave nothing behind, whatever ends their parent.

Every process leads a session, and what it spawns belongs to it. `stop` ends whole sessions. Should
this process die without stopping them, SIGKILL included, its watchdog does: a small process in a
session of its own that is told of every session through a pipe and kills those it still knows of
when the pipe closes. (The kernel's PR_SET_PDEATHSIG is not enough: SGLang's schedulers ask for it
late in their start, and it goes by threads, not by processes.)

The program `python -m sglang_smartgen.report.processes` is the watchdog.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

LINE_WIDTH = 300  # SGLang logs all its arguments in one line of 20,000 characters
_alive: set[ServerProcess] = set()


class ServerProcess:
    """One started program, its log file and the session it leads."""

    def __init__(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str], log: Path
    ) -> None:
        """Start `command`; its output is appended to `log`. Raises OSError as Popen does."""
        self.name = name
        self.log = log
        self.started = time.monotonic()
        watchdog = _watchdog()
        with log.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=log.parent,
                start_new_session=True,
            )
        _tell(watchdog, "watch", self.pid)
        _alive.add(self)

    @property
    def pid(self) -> int:
        """Process id of the program, and id of its session."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code (negative: the signal that ended it), or None while it runs."""
        return self._process.poll()

    def log_tail(self, lines: int = 12) -> list[str]:
        """The last `lines` non-empty lines that this process wrote, each cut to LINE_WIDTH."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            text = file.read().decode(errors="replace")
        written = [line[:LINE_WIDTH] for line in text.splitlines() if line.strip()]
        return written[-lines:]


def stop(processes: Iterable[ServerProcess], *, grace_s: float = 8.0) -> None:
    """End the processes and everything in their sessions.

    The processes themselves get SIGTERM and up to `grace_s` seconds to end what they started; what
    is left then, or after an interrupt, is killed. With `grace_s` 0 everything is killed at once.
    """
    processes = list(processes)
    try:
        if grace_s > 0:
            for process in processes:
                if process.exit_code is None:
                    _signal(process.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while any(p.exit_code is None for p in processes) and time.monotonic() < deadline:
                time.sleep(0.05)
    finally:
        for process in processes:
            kill_session(process.pid, reap=process)
            _alive.discard(process)
            _tell(_watchdog(), "forget", process.pid)


def kill_session(session: int, reap: ServerProcess | None = None) -> None:
    """SIGKILL all processes of a session and wait until they are gone.

    Raises RuntimeError when one of them has not ended after ten seconds.
    """
    deadline = time.monotonic() + 10
    while members := session_members(session):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {members} of session {session} do not end")
        for pid in members:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.05)
    if reap is not None:
        reap._process.wait()


def session_members(session: int) -> list[int]:
    """Ids of the processes that run in `session`; ended but unreaped ones do not count."""
    import psutil

    members = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                members.append(pid)
    return members


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@atexit.register
def _stop_all() -> None:
    if _alive:
        stop(list(_alive), grace_s=0)


# The watchdog -------------------------------------------------------------------------------

_watchdogs: dict[int, subprocess.Popen[bytes]] = {}


def _watchdog() -> IO[bytes]:
    """The pipe to the watchdog of this process, which is started at the first call."""
    if os.getpid() not in _watchdogs:  # a forked child must have its own
        _watchdogs[os.getpid()] = subprocess.Popen(
            [sys.executable, "-P", "-m", "sglang_smartgen.report.processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    pipe = _watchdogs[os.getpid()].stdin
    assert pipe is not None
    return pipe


def _tell(watchdog: IO[bytes], word: str, session: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # somebody killed it; there is still atexit
        watchdog.write(f"{word} {session}\n".encode())
        watchdog.flush()


def watch(lines: Iterable[str]) -> None:
    """Follow `watch N` and `forget N` until the lines end, then kill the sessions still watched."""
    sessions: set[int] = set()
    for line in lines:
        word, number = line.split()
        (sessions.add if word == "watch" else sessions.discard)(int(number))
    for session in sessions:
        kill_session(session)


if __name__ == "__main__":
    watch(sys.stdin)
