"""Turning token rows into few large spans: fewer requests is what makes a write fast.

Mooncake pays 65 to 95 us a request over TCP whatever its size, so rows that are neighbours in both
memories travel as one span.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_smartgen.transfer.transport import Span


def coalesce(spans: Sequence[Span]) -> list[Span]:
    """Sort by destination and merge neighbours contiguous in both source and destination.

    Empty spans are dropped. Spans whose destinations overlap are kept as they are: which of them
    wins was never promised.
    """
    merged: list[Span] = []
    for span in sorted((s for s in spans if s.length > 0), key=lambda s: (s.destination, s.source)):
        if merged:
            last = merged[-1]
            if (
                last.destination + last.length == span.destination
                and last.source + last.length == span.source
            ):
                merged[-1] = last._replace(length=last.length + span.length)
                continue
        merged.append(span)
    return merged


def spans_for_slots(
    source: int,
    row_bytes: int,
    destination: int,
    slots: npt.ArrayLike,
    start: int = 0,
    stop: int | None = None,
) -> list[Span]:
    """Return the coalesced spans that put tokens ``[start, stop)`` into their slots.

    ``source`` is the address of token 0's row; rows of ``row_bytes`` bytes lie in token order.
    ``slots`` is an integer array [tokens]: token t goes to ``destination + slots[t] * row_bytes``.
    A run of consecutive slots becomes one span; spans come in token order. ``stop`` defaults to all
    tokens. ValueError when the range leaves ``slots``, a slot is negative or ``row_bytes`` < 1.
    """
    rows = np.asarray(slots)
    if rows.ndim != 1 or not (np.issubdtype(rows.dtype, np.integer) or rows.size == 0):
        raise ValueError(f"slots must be integers [tokens], got {rows.dtype} {list(rows.shape)}")
    if row_bytes < 1:
        raise ValueError(f"row_bytes must be >= 1, got {row_bytes}")
    end = len(rows) if stop is None else stop
    if not 0 <= start <= end <= len(rows):
        raise ValueError(f"token range [{start}, {end}) must lie inside [0, {len(rows)})")
    if start == end:
        return []
    wanted = rows[start:end].astype(np.int64)
    if int(wanted.min()) < 0:
        raise ValueError(f"slots must be >= 0, got {int(wanted.min())}")
    heads = np.flatnonzero(np.diff(wanted) != 1) + 1
    first = np.concatenate(([0], heads))
    count = np.diff(np.concatenate((first, [len(wanted)])))
    # tolist() gives Python integers: addresses above 2**63 must not overflow int64.
    return [
        Span(source + (start + at) * row_bytes, destination + slot * row_bytes, rows_ * row_bytes)
        for at, slot, rows_ in zip(
            first.tolist(), wanted[first].tolist(), count.tolist(), strict=True
        )
    ]
