"""The one configuration of SmartGen: a frozen struct from a file, a JSON text or the env."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

CONFIG_ENV = "SGLANG_SMARTGEN_CONFIG"
MIN_STORE_GB = 0.001

Mode = Literal["smartgen", "full", "partial", "proactive_only"]
Order = Literal["observed", "profile", "sequential", "random", "streaming", "oracle"]
Credit = Literal["adaptive", "fixed"]
DevicePath = Literal["cpu", "cuda", "cuda_graph"]
Kernels = Literal["auto", "triton", "flashinfer"]


class ConfigError(ValueError):
    """A configuration value that cannot be used; its text is one sentence for the user."""


class SmartGenConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of both sides. P reads `selector`, `store_gb`, `store_server` and `fetch_timeout_s`,
    D the rest.

    Attributes
    ----------
    mode: what is sent before decode starts; see docs/concepts.md.
    selector: name of the KV selector (`sglang_smartgen.select.registry`).
    selector_options: the selector's own settings by name (docs/selectors.md); on both sides alike.
    artifact: file of `smartgen calibrate` for the selector; on both sides the same one.
    ratio: share of the prompt's entries that a decode step may use, 0 < ratio <= 1.
    lookahead: choose the entries of a layer from the input of the layer before, so that they are
        fetched while that layer runs; false = from the layer's own query.
    parallel_lanes: fetch what is remote while the local lane gathers and, with lookahead, while the
        layer before runs; false = one after the other, as mode `partial` always does.
    blocks_per_layer: M, the number of token ranges that a layer is pushed in.
    proactive_blocks: K_r, blocks pushed before decode starts, clipped to [2M, L*M];
        none = as many as fit behind the prefill at the measured bandwidth.
    order: order in which blocks are pushed, and later filled in.
    profile: file of `smartgen profile` on P: importance of the blocks, and what prefill takes.
    speculative_ratio: share of all blocks that P may send ahead in a decode step; 0 = no fill.
    credit: `fixed` grants that share in every step (the paper), `adaptive` as much as fits between
        the fetches, whatever the share.
    record: name under which D records what this request selects; one request's setting.
    recording: name of a recording of the same prompt, for order `oracle`; one request's setting.
    verify: P sends checksums of the prompt's KV and D compares what it has, when decode starts and
        when it ends; a difference fails the request, or is counted when it has ended.
    trace: D's record of this request holds the times of its steps; one request's setting.
    min_prompt_len: prompts shorter than this use SGLang's own full transfer and dense attention.
    store_gb: budget of the prefill store in GiB, of each rank.
    store_server: `thread` serves the store inside the scheduler process, `process` in a process of
        its own: fetches then hardly slow the prefill down, for a second transport engine and some
        300 MB of memory. `auto` is `process`, but `thread` with a hierarchical cache, whose pages
        another process cannot see, and with rails, whose priorities hold inside one process.
    fetch_timeout_s: seconds that one remote fetch may take before its requests fail; on P, that
        one write of a fetch may take. Set it alike on both.
    transport: `mooncake`, or `rails`: every way that both nodes have, see docs/rails.md.
    rails: with transport `rails`, the rails of this node, `kind` or `kind@address` (kinds mooncake,
        socket, shm, nixl); none = what is found on it.
    device_path: `cpu` serves on CPU hosts only; `cuda` serves on a GPU host, and `cuda_graph`
        decodes there in CUDA graphs besides. Experimental: neither has been run on a GPU yet.
    attention_kernels: what attends and ranks on a GPU, `triton` (ours) or `flashinfer`; `auto` is
        PyTorch on a CPU and `triton` on a GPU.
    """

    mode: Mode = "smartgen"
    selector: str = "hata"
    selector_options: dict[str, bool | int | float | str] = msgspec.field(default_factory=dict)
    artifact: str = ""
    ratio: float = 0.2
    lookahead: bool = True
    parallel_lanes: bool = True
    blocks_per_layer: int = 1024
    proactive_blocks: int | None = None
    order: Order = "observed"
    profile: str = ""
    speculative_ratio: float = 0.1
    credit: Credit = "adaptive"
    record: str = ""
    recording: str = ""
    verify: bool = False
    trace: bool = False
    min_prompt_len: int = 256
    store_gb: float = 4.0
    store_server: Literal["auto", "thread", "process"] = "auto"
    fetch_timeout_s: float = 5.0
    transport: Literal["mooncake", "rails"] = "mooncake"
    rails: list[str] = msgspec.field(default_factory=list)
    device_path: DevicePath = "cpu"
    attention_kernels: Kernels = "auto"

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ConfigError(f"ratio is {self.ratio}; allowed is 0 < ratio <= 1")
        if not 0 <= self.speculative_ratio <= 1:
            raise ConfigError(
                f"speculative_ratio is {self.speculative_ratio}; allowed is 0 to 1 (0 = off)"
            )
        for field in ("blocks_per_layer", "min_prompt_len", "store_gb", "fetch_timeout_s"):
            if not getattr(self, field) > 0:
                raise ConfigError(f"{field} is {getattr(self, field)}; it must be positive")
        if self.store_gb < MIN_STORE_GB:
            raise ConfigError(f"store_gb is {self.store_gb}; it must be at least {MIN_STORE_GB}")
        if self.proactive_blocks is not None and self.proactive_blocks <= 0:
            raise ConfigError(
                f"proactive_blocks is {self.proactive_blocks}; it must be positive, "
                "or left out to let SmartGen choose"
            )
        self._check_rails()
        from sglang_smartgen.select.registry import check_name

        try:
            check_name(self.selector)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _check_rails(self) -> None:
        if self.rails and self.transport != "rails":
            raise ConfigError(f"rails is {self.rails}; it needs transport 'rails'")
        if len(self.rails) > 32:
            raise ConfigError(f"rails has {len(self.rails)} rails; allowed are 32")
        from sglang_smartgen.transfer.rails.name import split

        for rail in self.rails:
            try:
                split(rail)
            except ValueError as error:
                raise ConfigError(str(error)) from None

    def proactive_blocks_of(self, layers: int) -> int | None:
        """K_r for a model of `layers` layers under this mode, before clipping to [2M, L*M].

        None where it is to be computed.
        """
        total = layers * self.blocks_per_layer
        if self.mode == "full":
            return total
        if self.mode == "partial":
            return 2 * self.blocks_per_layer
        return None if self.proactive_blocks is None else min(self.proactive_blocks, total)

    def for_request(self, overrides: object) -> SmartGenConfig:
        """This configuration with one request's own values of the keys PER_REQUEST.

        They come from `sampling_params.custom_params["smartgen"]`, so that one pair of servers can
        run the arms of a comparison side by side. Raises ConfigError on anything else.
        """
        if overrides is None:
            return self
        if not isinstance(overrides, dict) or not set(overrides) <= set(PER_REQUEST):
            raise ConfigError(
                f"custom_params.smartgen is {overrides!r}; allowed is an object with the keys "
                f"{', '.join(PER_REQUEST)}"
            )
        return _convert({**msgspec.to_builtins(self), **overrides})


PER_REQUEST = (
    "mode",
    "ratio",
    "lookahead",
    "parallel_lanes",
    "proactive_blocks",
    "order",
    "speculative_ratio",
    "credit",
    "record",
    "recording",
    "verify",
    "trace",
)


def load_config(source: str) -> SmartGenConfig:
    """Read a configuration from a JSON text (it starts with `{`) or from a JSON file.

    Raises ConfigError with one sentence that names the key, what was given and what is allowed.
    """
    text = source.strip()
    if not text.startswith("{"):
        path = Path(text)
        try:
            text = path.read_text()
        except (OSError, ValueError) as error:
            cause = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"smartgen config file {path}: {cause}") from None
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"smartgen config is not valid JSON: {error}") from None
    return _convert(value)


def config_from_env() -> SmartGenConfig | None:
    """What `SGLANG_SMARTGEN_CONFIG` configures, or None when SmartGen is switched off."""
    source = os.environ.get(CONFIG_ENV, "").strip()
    return load_config(source) if source else None


def _convert(value: Any) -> SmartGenConfig:
    try:
        return msgspec.convert(value, SmartGenConfig)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(_sentence(str(error), value)) from None


def _sentence(message: str, value: Any) -> str:
    """msgspec's message in our form: the key, what was given, what is allowed."""
    if unknown := re.search(r"unknown field `(.+?)`", message):
        allowed = ", ".join(SmartGenConfig.__struct_fields__)
        return f"smartgen config: unknown key '{unknown[1]}'; allowed keys are {allowed}"
    if at := re.search(r"at `\$\.(\w+)`", message):
        key = at[1]
        hint = get_type_hints(SmartGenConfig)[key]
        if get_origin(hint) is Literal:
            allowed = ", ".join(str(choice) for choice in get_args(hint))
            return f"{key} is {value[key]!r}; allowed are {allowed}"
        return f"{key} is {value[key]!r}; {message.split(' - ')[0].lower()}"
    return f"smartgen config: {message}"
