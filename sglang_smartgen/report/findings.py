"""One line of `smartgen doctor`, and how a check is run so that nothing it does ends the doctor.

A check yields findings; what it raises becomes an error line. What may crash the interpreter or
hang (GPU drivers, SGLang's import, the network engine) runs in a process of its own, which prints
one JSON object a step; a step that did not come is an error that says how the process ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import msgspec

State = Literal["ok", "warning", "error"]


class Finding(msgspec.Struct, frozen=True):
    """What was looked at, how it is, and for a warning or an error how to mend it."""

    section: str
    name: str
    state: State
    text: str
    mend: str = ""


Check = Callable[[], Iterable[Finding]]


def ok(section: str, name: str, text: str) -> Finding:
    """As it should be."""
    return Finding(section, name, "ok", text)


def warning(section: str, name: str, text: str, mend: str) -> Finding:
    """It works, with a disadvantage."""
    return Finding(section, name, "warning", text, mend)


def error(section: str, name: str, text: str, mend: str) -> Finding:
    """SmartGen will not work so."""
    return Finding(section, name, "error", text, mend)


def guarded(section: str, check: Check) -> Iterator[Finding]:
    """The findings of a check; an exception in it is the last one."""
    try:
        yield from check()
    except Exception as problem:
        yield error(
            section,
            "check",
            f"could not be made: {type(problem).__name__}: {problem}",
            "mend what it names, or report it with this line",
        )


def steps_of(module: str, names: Iterable[str], timeout_s: float) -> dict[str, dict[str, Any]]:
    """What the process `python -m module` found out, by step.

    Each of its lines of stdout that is a JSON object with the key `step` counts. A step of `names`
    that is missing gets `{"failed": how the process ended}`.
    """
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    # Not a server's: what it configures must not start here.
    environment.pop("SGLANG_SMARTGEN_CONFIG", None)
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        errors="replace",
        start_new_session=True,  # so that what it started ends with it
    )
    try:
        out, complaint = child.communicate(timeout=timeout_s)
        ended = _how(child.returncode)
    except subprocess.TimeoutExpired:
        _kill(child)
        out, complaint = child.communicate()
        ended = f"it did not end within {timeout_s:.0f} s"
    except BaseException:
        _kill(child)
        raise
    found: dict[str, dict[str, Any]] = {}
    for line in out.splitlines():
        try:
            step = json.loads(line)
        except ValueError:
            continue
        if isinstance(step, dict) and isinstance(step.get("step"), str):
            found[step["step"]] = step
    last = next((line.strip() for line in reversed(complaint.splitlines()) if line.strip()), "")
    for name in names:
        found.setdefault(name, {"failed": f"{ended}{': ' if last else ''}{last[-300:]}"})
    return found


def _kill(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _how(code: int) -> str:
    if code < 0:
        return f"its process was ended by signal {-code}"
    return f"its process ended with exit code {code}"
