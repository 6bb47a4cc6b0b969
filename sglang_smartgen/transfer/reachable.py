"""Whether a process still listens: the one sign of its end that a peer can see."""

from __future__ import annotations

import socket

from sglang_smartgen.transfer.messages import Endpoint


def refuses_connections(endpoint: Endpoint, timeout_s: float = 0.05) -> bool:
    """True when nothing listens there any more, which only the end of its process brings about."""
    try:
        with socket.create_connection((endpoint.host, endpoint.port), timeout_s):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
