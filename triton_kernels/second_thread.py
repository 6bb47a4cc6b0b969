"""A second thread for CPU paths: where one call has so much to do that waking it pays."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_second = ThreadPoolExecutor(1, thread_name_prefix="smartgen-second")  # idle between calls


def side_by_side(here: Callable[[], None], there: Callable[[], None]) -> None:
    """Run both at once and return when both are done; neither may need the interpreter's lock.

    Raises what `here` raises, else what `there` raises.
    """
    other = _second.submit(there)
    try:
        here()
    finally:
        other.exception()  # it writes to the caller's memory: done before anything goes on
    other.result()
