"""Where the two kinds of host differ: the seam between the engine and `engine/cuda`.

Everything else in `engine` sees host memory only. On a CPU host that is all there is; on a GPU host
the KV pool of D and the store of P are pinned, so that a device reads the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from sglang_smartgen.config import ConfigError, SmartGenConfig
from sglang_smartgen.select.base import Selector
from sglang_smartgen.transfer.push_room import PushRoom
from sglang_smartgen.transfer.region import HostRegion

UNPROVEN = (
    "device_path is {path}: SmartGen's CUDA path has not been run on a GPU yet "
    "(docs/gpu-status.md); do not rely on it"
)

Stored = Callable[[PushRoom, int], None]
"""Called with a push and a layer of which new tokens are in the store."""


class Copies(Protocol):
    """How a layer's new tokens get from P's KV pool to the store, in order."""

    def copy(
        self,
        push: PushRoom,
        layer: int,
        slots: Tensor,
        pools: tuple[Tensor, Tensor],
        queries: Tensor | None = None,
    ) -> None:
        """Copy what the entry lacks of the tokens at `slots` int64 [tokens so far] of a layer.

        pools: the layer's K and V [slots, kv_heads, head_dim]. queries: the last queries of the
        prompt [w, q_heads, head_dim], for a plan that looks at them.
        """

    def taken(self, push: PushRoom, layer: int) -> int:
        """How many tokens of a layer are in the store or on their way."""

    def behind(self, call: Callable[[], None]) -> None:
        """Run `call` when all copies so far are in the store."""


class HostCopies:
    """Pool and store are both host memory: a copy is done when `copy` returns."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored

    def copy(
        self,
        push: PushRoom,
        layer: int,
        slots: Tensor,
        pools: tuple[Tensor, Tensor],
        queries: Tensor | None = None,
    ) -> None:
        """See Copies."""
        entry = push.entry
        if queries is not None:
            push.queries[layer] = queries.clone()
        if entry.capture(layer, slots, *pools, min(len(slots), entry.prompt_len)):
            self._stored(push, layer)

    def taken(self, push: PushRoom, layer: int) -> int:
        """See Copies."""
        return push.entry.captured[layer]

    def behind(self, call: Callable[[], None]) -> None:
        """See Copies: there is nothing to wait for."""
        call()


class DevicePath:
    """What a CPU host needs; `engine/cuda/path.py` has that of a GPU host."""

    def region(self, length: int) -> HostRegion:
        """Zeroed memory that a transport, CPU threads and the device share."""
        return HostRegion(length)

    def pin(self, region: HostRegion) -> None:
        """Make memory that is there already fit for copies from the device."""

    def copies(self, stored: Stored, selector: Selector) -> Copies:
        """How P captures; `selector` makes the metadata where that is done before the copy."""
        return HostCopies(stored)

    def attention(self, runner: Any) -> Any:
        """D's attention backend."""
        from sglang_smartgen.engine.attention import SmartGenAttnBackend

        return SmartGenAttnBackend(runner)


def device_path(config: SmartGenConfig) -> DevicePath:
    """The path that a configuration asks for."""
    if config.device_path == "cpu":
        return DevicePath()
    from sglang_smartgen.engine.cuda.path import CudaPath

    return CudaPath(config)


def check_device(config: SmartGenConfig, device: str) -> str | None:
    """Whether a configuration may serve on the device type `device`; a warning where there is one.

    Raises ConfigError with one sentence where it may not.
    """
    asked = config.device_path
    if device == "cpu":
        if asked != "cpu":
            raise ConfigError(f"device_path is {asked}; this server runs on cpu, which allows cpu")
        if config.attention_kernels != "auto":
            raise ConfigError(
                f"attention_kernels is {config.attention_kernels}; it runs on a GPU only, and this "
                "server runs on cpu, which allows auto"
            )
        return None
    if device != "cuda":
        raise ConfigError(f"SmartGen cannot serve on {device}; allowed are cpu and cuda")
    if asked == "cpu":
        raise ConfigError(
            "SmartGen cannot serve on cuda: its CUDA path has not been run on a GPU yet; allowed "
            "is --device cpu, or the config key device_path to try it"
        )
    return UNPROVEN.format(path=asked)
