"""What a decode rank has registered, told to a transport that can use it."""

from __future__ import annotations

import msgspec

from sglang_smartgen.transfer.messages import Registration
from sglang_smartgen.transfer.rails.transport import RailsTransport
from sglang_smartgen.transfer.transport import Transport


def introduce(transport: Transport, registration: Registration) -> None:
    """Give a rails transport the card of a decode rank; the others need none."""
    if isinstance(transport, RailsTransport) and registration.rails is not None:
        card = registration.rails
        if not card.scratch:
            card = msgspec.structs.replace(card, scratch=registration.scratch)
        transport.meet(registration.session, card)
