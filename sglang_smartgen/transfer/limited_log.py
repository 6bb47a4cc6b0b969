"""Log lines that a peer can cause at will: so many a minute, then only their number."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LINES = 20
PERIOD_S = 60.0


class LimitedLog:
    """Warnings of one kind, at most `lines` in each `period_s` seconds; for one thread."""

    def __init__(
        self,
        logger: logging.Logger,
        *,
        lines: int = LINES,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger, self._lines, self._period_s, self._clock = logger, lines, period_s, clock
        self._began = -period_s
        self._seen = 0

    def warning(self, text: str, *values: object) -> None:
        """Log it, or count it; the first line of a period says how many the last one left out."""
        now = self._clock()
        if now - self._began >= self._period_s:
            if (hidden := self._seen - self._lines) > 0:
                self._logger.warning("SmartGen: %d more lines like the last were left out", hidden)
            self._began, self._seen = now, 0
        self._seen += 1
        if self._seen <= self._lines:
            self._logger.warning(text, *values)
