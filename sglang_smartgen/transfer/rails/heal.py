"""Bringing a link back: probes while it is paused, fences while failed writes may read our memory.

One thread a link that needs it; it ends when the link needs neither. A probe is a write of one byte
to the peer's scratch bytes, the next one follows when the rail has said what became of it.
"""

from __future__ import annotations

import threading

from sglang_smartgen.transfer.rails.link import Link
from sglang_smartgen.transfer.rails.spray import Sprayer
from sglang_smartgen.transfer.transport import Span, TransportError, WriteState

PROBE_EVERY_S = 0.2
FENCE_S = 10.0


def start(sprayer: Sprayer, link: Link, source: int, scratch: int, closed: threading.Event) -> None:
    """Heal the link in the background. source: address of one readable byte of ours."""

    def run() -> None:
        while not closed.is_set():
            try:
                if link.paused:
                    if probe(link, source, scratch, closed):
                        sprayer.answered(link)
                else:
                    held = list(link.held)
                    if link.transport.fence(link.session, scratch, FENCE_S):
                        sprayer.fenced(link, held)
            except (TransportError, ValueError):
                pass  # the rail is closed or cannot say: the link stays as it is
            if sprayer.healed(link):
                return
            closed.wait(PROBE_EVERY_S)

    threading.Thread(target=run, name=f"smartgen-heal-{link.name}", daemon=True).start()


def probe(link: Link, source: int, scratch: int, closed: threading.Event) -> bool:
    """Whether one byte gets through; waits for the rail's answer, however long that takes."""
    handle = link.transport.write(link.session, [Span(source, scratch, 1)])
    while handle.poll() is WriteState.PENDING and not closed.is_set():
        handle.wait(0.5)
    return handle.poll() is WriteState.DONE
