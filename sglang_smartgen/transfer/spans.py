"""Turning token rows into few large spans: fewer requests is what makes a write fast.

Mooncake pays 65 to 95 us a request over TCP whatever its size, so rows that are neighbours in both
memories travel as one span.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_smartgen.transfer.transport import Span

Tokens = npt.NDArray[np.int64]


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
    tokens: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
) -> list[Span]:
    """Return the coalesced spans that put tokens into their slots.

    ``source`` is the address of token 0's row; rows of ``row_bytes`` bytes lie in token order.
    ``tokens`` [n] are the tokens to send and ``slots`` [n] where each goes, ``destination + slot *
    row_bytes``. Neighbours in both become one span; spans come in the order of ``tokens``.
    ValueError when the two differ in length, one is negative or ``row_bytes`` < 1.
    """
    if tokens.ndim != 1 or tokens.shape != slots.shape:
        raise ValueError(
            f"tokens is {list(tokens.shape)}, slots {list(slots.shape)}; both must be [n]"
        )
    if row_bytes < 1:
        raise ValueError(f"row_bytes must be >= 1, got {row_bytes}")
    if not len(tokens):
        return []
    for field, values in (("tokens", tokens), ("slots", slots)):
        if (least := int(values.min())) < 0:
            raise ValueError(f"{field} must be >= 0, got {least}")
    heads = np.flatnonzero((np.diff(tokens) != 1) | (np.diff(slots) != 1)) + 1
    first = np.concatenate(([0], heads))
    count = np.diff(np.concatenate((first, [len(tokens)])))
    # tolist() gives Python integers: addresses above 2**63 must not overflow int64.
    runs = zip(tokens[first].tolist(), slots[first].tolist(), count.tolist(), strict=True)
    return [
        Span(source + token * row_bytes, destination + slot * row_bytes, rows * row_bytes)
        for token, slot, rows in runs
    ]
