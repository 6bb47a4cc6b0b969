"""What P pushes of a request before decode: K_r from speed and network, and the order of blocks."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from sglang_smartgen.config import ConfigError, SmartGenConfig
from sglang_smartgen.core import recordings
from sglang_smartgen.core.importance import block_importance
from sglang_smartgen.core.proactive import proactive_blocks
from sglang_smartgen.core.profile import Profile, ProfileError, check_profile, read_profile
from sglang_smartgen.core.room_plan import RoomPlan
from sglang_smartgen.core.speed import PrefillSpeed
from sglang_smartgen.engine.model_facts import ModelFacts
from sglang_smartgen.select.base import Selector
from sglang_smartgen.transfer.messages import OpenRoom
from sglang_smartgen.transfer.transport import Transport

UNMEASURED_SHARE = 4
"""One in so many blocks is pushed while neither speed nor bandwidth has been measured."""


class PushPolicy:
    """Makes the plan of every room; used by the scheduler thread alone."""

    def __init__(
        self, config: SmartGenConfig, facts: ModelFacts, selector: Selector, transport: Transport
    ) -> None:
        self._config = config
        self._facts = facts
        self._selector = selector
        self._transport = transport
        self.profile = _load_profile(config, facts)
        known = [] if self.profile is None else self.profile.manifest.ranges
        self.speed = PrefillSpeed({int(r.prompt_tokens): r.prefill_s for r in known})

    def plan(self, message: OpenRoom, session: str) -> RoomPlan:
        """The plan of a room that D opened. Raises ValueError when its order cannot be had."""
        blocks = min(message.blocks_per_layer, message.prompt_len)
        k_r = message.proactive_blocks
        if k_r is None:
            k_r = self._computed(message, session, blocks)
        return RoomPlan(
            self._facts.geometry,
            order=message.order,
            prompt_len=message.prompt_len,
            blocks=blocks,
            k_r=k_r,
            k=message.k,
            scaling=self._facts.shape.scaling,
            seed=message.generation,
            importance=self._importance(message, blocks),
            elastic=message.proactive_blocks is None,
        )

    def _computed(self, message: OpenRoom, session: str, blocks: int) -> int:
        """K_r that fits behind this prompt's prefill at the bandwidth measured to this peer."""
        g = self._facts.geometry
        prefill_s = self.speed.expect(message.prompt_len)
        bandwidth = self._transport.bandwidth(session)
        if prefill_s is None or bandwidth is None:
            return g.layers * blocks // UNMEASURED_SHARE
        metadata = 0
        if message.metadata:
            row = self._selector.metadata_bytes(self._facts.shape, len(g.sparse_layers))
            metadata = row * message.prompt_len
        return proactive_blocks(
            prefill_s=prefill_s,
            bandwidth=bandwidth,
            metadata_bytes=metadata,
            block_bytes=2 * g.row_bytes * message.prompt_len / blocks,
            layers=g.layers,
            blocks=blocks,
            dense_layers=len(g.dense_layers),
        )

    def _importance(self, message: OpenRoom, blocks: int) -> Tensor | None:
        """What the order ranks by, [layers, blocks], or None where it needs nothing."""
        g = self._facts.geometry
        if message.order == "oracle":
            counts = recordings.read_counts(message.recording)
            wanted = (len(g.sparse_layers), g.kv_heads, message.prompt_len)
            if counts.shape != wanted:
                raise recordings.RecordingError(
                    f"recording {message.recording} is {list(counts.shape)}; it must be "
                    f"{list(wanted)}"
                )
            return block_importance(
                counts, 1, layers=g.layers, blocks=blocks, sparse_layers=g.sparse_layers
            )
        if message.order in ("profile", "observed") and self.profile is not None:
            return self.profile.importance_for(message.prompt_len, g.layers, blocks)
        return None


def _load_profile(config: SmartGenConfig, facts: ModelFacts) -> Profile | None:
    """The profile that the config names. Raises ConfigError when it cannot be used."""
    if not config.profile:
        if config.order == "profile":
            raise ConfigError("order is profile; it needs the key profile, a file of its own")
        return None
    g = facts.geometry
    try:
        profile = read_profile(Path(config.profile))
        check_profile(
            profile,
            selector=config.selector,
            layers=g.layers,
            kv_heads=g.kv_heads * facts.tp_size,
            head_dim=g.head_dim,
        )
    except ProfileError as error:
        raise ConfigError(f"profile is {config.profile}: {error}") from None
    return profile
