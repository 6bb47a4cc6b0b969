"""What must arrive at a peer: an intent, the slices it is cut to, and one attempt at a slice.

Everything but `Completion`'s part is guarded by the lock of the peer's sprayer (see spray.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sglang_smartgen.transfer.spans import coalesce
from sglang_smartgen.transfer.transport import Completion, Priority, Span

if TYPE_CHECKING:
    from sglang_smartgen.transfer.rails.link import Link

SLICE_BYTES = 64 << 10
"""No slice is smaller, but for requests that are."""
SLICE_SPANS = 480


class Intent(Completion):
    """One write and its handle. Contiguous spans are merged; slices are cut when a link is free."""

    def __init__(
        self,
        spans: Sequence[Span],
        priority: Priority = Priority.PROACTIVE,
        deadline: float | None = None,
    ) -> None:
        """deadline: of the sprayer's clock, None for none. The spans are not empty ones."""
        super().__init__()
        self.priority = priority
        self.deadline = deadline
        self.spans = coalesce(spans) if len(spans) > 1 else list(spans)
        self.total = sum(span.length for span in self.spans)
        self.may: list[bool] | None = None  # which links reach its memory; None: all
        self.device = False  # some of its sources are device memory
        self.uncut = self.total  # bytes in no slice yet
        self.landed = 0
        self.open = 0  # slices that have not landed
        self.again: deque[Slice] = deque()  # slices to be sent once more
        self.twice: list[Slice] = []  # landed slices of which another attempt is not final
        self.linger_until: float | None = None
        self.over = False  # final, or about to be told so
        self.cause: str | None = None
        self.canceller: Callable[[Intent], None] | None = None
        self._at = 0  # span that is cut next
        self._offset = 0  # of that span, bytes cut already

    @property
    def progress(self) -> float:
        """Share of the bytes that has landed, 0 to 1."""
        return self.landed / self.total if self.total else 1.0

    def cancel(self) -> None:
        """Send nothing that was not started; FAILED once nothing of it is under way."""
        if self.canceller is not None:
            self.canceller(self)

    def cut(self, length: int) -> Slice:
        """The next slice, of about `length` bytes; some must be uncut.

        What is left is shared out evenly: a last slice that took what remains of one as well would
        hold up whatever waits behind it for twice the time.
        """
        uncut = self.uncut
        count = min(-(-uncut // length), uncut // SLICE_BYTES)
        length = -(-uncut // count) if count > 1 else uncut
        spans: list[Span] = []
        size = 0
        while size < length and len(spans) < SLICE_SPANS:
            span = self.spans[self._at]
            piece = min(span.length - self._offset, length - size)
            spans.append(Span(span.source + self._offset, span.destination + self._offset, piece))
            size += piece
            self._offset += piece
            if self._offset == span.length:
                self._at, self._offset = self._at + 1, 0
        self.uncut -= size
        self.open += 1
        return Slice(self, spans, size)


class Slice:
    """A part of an intent that travels as one: spans with absolute destinations."""

    __slots__ = (
        "attempts",
        "done",
        "doubt",
        "failed_on",
        "failures",
        "intent",
        "length",
        "not_before",
        "spans",
    )

    def __init__(self, intent: Intent, spans: list[Span], length: int) -> None:
        self.intent = intent
        self.spans = spans
        self.length = length
        self.attempts = 0  # not final
        self.done = False
        self.doubt = False  # bytes of a failed attempt may still land
        self.failures = 0
        self.failed_on: set[Link] = set()
        self.not_before = 0.0


class Attempt:
    """One slice on one link. `buffer`: offset and length in the staging memory, if copied there."""

    __slots__ = ("abandoned", "ahead", "began", "buffer", "expected_s", "link", "slice")

    def __init__(self, slice_: Slice, link: Link, ahead: int, expected_s: float) -> None:
        self.slice = slice_
        self.link = link
        self.ahead = ahead  # bytes before it on the link
        self.expected_s = expected_s
        self.began = 0.0
        self.buffer: tuple[int, int] | None = None
        self.abandoned = False  # the slice was given to another link
