"""The decode ranks that have registered with this prefill rank."""

from __future__ import annotations

import logging

from sglang_smartgen.config import ConfigError
from sglang_smartgen.engine.model_facts import ModelFacts
from sglang_smartgen.transfer.messages import Registration
from sglang_smartgen.transfer.push_room import Peer

logger = logging.getLogger(__name__)


def check_sizes(address: str, theirs: int, ours: int) -> None:
    """Raises ConfigError when the prefill node at `address` has more or fewer ranks than we."""
    if theirs != ours:
        raise ConfigError(
            f"the prefill node at {address} runs with --tp-size {theirs} and this decode node with "
            f"{ours}; SmartGen allows equal sizes"
        )


class Peers:
    """Registered decode ranks by session. Any thread may read; the bootstrap thread adds."""

    def __init__(self, facts: ModelFacts, fingerprint: str) -> None:
        """fingerprint: of this node's selector."""
        self._facts = facts
        self._fingerprint = fingerprint
        self._peers: dict[str, Peer] = {}

    def add(self, registration: Registration, keys: list[int], values: list[int]) -> bool:
        """A decode rank announced itself; False when its layout differs (stock transfer)."""
        g = self._facts.geometry
        if registration.tp_size != self._facts.tp_size:
            logger.warning(
                "decode session %s runs with --tp-size %d and this prefill node with %d; SmartGen "
                "allows equal sizes",
                registration.session,
                registration.tp_size,
                self._facts.tp_size,
            )
            return False
        same = (
            registration.layers == g.layers == len(keys) == len(values)
            and registration.kv_row_bytes == g.row_bytes
            and registration.fingerprint == self._fingerprint
        )
        if same:
            self._peers[registration.session] = Peer(registration, keys, values)
        else:
            logger.warning(
                "decode session %s differs from this node (selector or KV layout); its requests "
                "get a full transfer",
                registration.session,
            )
        return same

    def get(self, session: str) -> Peer | None:
        """The registered decode rank of a session."""
        return self._peers.get(session)

    def sessions(self) -> list[str]:
        """The sessions of all decode ranks."""
        return list(self._peers)
