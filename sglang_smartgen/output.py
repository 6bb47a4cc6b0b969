"""Where the result of a command goes: stdout, and with `--format json` nothing else goes there."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def result_stream(form: str) -> Iterator[TextIO]:
    """The stdout of the caller; while this is open and `form` is `json`, prints go to stderr.

    Whatever a library prints must not get between the caller and the JSON.
    """
    out = sys.stdout
    with contextlib.ExitStack() as stack:
        if form == "json":
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield out
