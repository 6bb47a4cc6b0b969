"""Doctor: the configuration, its artifact and profile against the model, and memory for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_smartgen.report.findings import Finding, error, ok, warning

if TYPE_CHECKING:
    from sglang_smartgen.config import SmartGenConfig

SECTION = "files"
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
FLOAT32_BYTES = 4


class Files(msgspec.Struct, frozen=True):
    """What the user named; "" where it was not."""

    config: str = ""
    artifact: str = ""
    profile: str = ""
    model: str = ""


class Shape(msgspec.Struct, frozen=True):
    """A model's sizes as its config.json has them. dtype_bytes: of KV in its own dtype."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes


def check(files: Files) -> Iterator[Finding]:
    """Configuration first: what it names is looked at like what was given."""
    from sglang_smartgen.config import ConfigError, SmartGenConfig, load_config
    from sglang_smartgen.select.registry import selector_class

    config: SmartGenConfig | None = SmartGenConfig()
    if files.config:
        try:
            config = load_config(files.config)
            text = f"mode {config.mode}, selector {config.selector}, ratio {config.ratio}"
            yield ok(SECTION, "config", text)
        except ConfigError as problem:
            config = None
            yield error(SECTION, "config", str(problem), "correct it (docs: configuration)")
    shape: Shape | None = None
    if files.model:
        try:
            shape = read_shape(Path(files.model))
            text = f"{shape.layers} layers, {shape.kv_heads} KV heads of {shape.head_dim}"
            yield ok(SECTION, "model", f"{text}, {shape.token_bytes} bytes of KV a token")
        except (OSError, ValueError, KeyError, TypeError) as problem:
            text = f"{files.model}: {_say(problem)}"
            yield error(SECTION, "model", text, "name a folder with a Hugging Face config.json")
    chosen = config or SmartGenConfig()
    artifact = files.artifact or chosen.artifact
    if artifact:
        yield from _artifact(Path(artifact), chosen, shape, files.model)
    elif selector_class(chosen.selector).needs_artifact:
        mend = f"make one: smartgen calibrate --selector {chosen.selector}"
        yield error(SECTION, "artifact", f"selector {chosen.selector} needs one", mend)
    profile = files.profile or chosen.profile
    if profile:
        yield from _profile(Path(profile), chosen, shape, files.model)
    elif chosen.order == "profile":
        yield error(SECTION, "profile", "order is profile; it needs one", "smartgen profile")
    yield from check_memory(chosen, shape)


def _artifact(
    path: Path, config: SmartGenConfig, shape: Shape | None, model: str
) -> Iterator[Finding]:
    from sglang_smartgen.select.artifact import (
        ArtifactError,
        check_artifact,
        model_hash,
        read_artifact,
    )
    from sglang_smartgen.select.base import KVShape

    mend = f"make it anew: smartgen calibrate --selector {config.selector}"
    try:
        artifact = read_artifact(path)
        made = artifact.manifest
        if shape is None:
            if made.selector != config.selector:
                raise ArtifactError(
                    f"the artifact was made for selector {made.selector}; "
                    f"here it is {config.selector}"
                )
            text = "whole; not compared with a model (give --model)"
        else:
            sizes = (shape.layers, shape.q_heads, shape.kv_heads, shape.head_dim)
            whole = KVShape(**dict(zip(_SIZES, sizes, strict=True)), scaling=1.0)
            found = model_hash(Path(model))
            check_artifact(artifact, selector=config.selector, shape=whole, model_hash=found)
            text = "whole, and made for this model"
    except ArtifactError as problem:
        yield error(SECTION, "artifact", str(problem), mend)
        return
    yield ok(SECTION, "artifact", f"{made.selector} of {made.created}: {text}")


_SIZES = ("layers", "q_heads", "kv_heads", "head_dim")


def _profile(
    path: Path, config: SmartGenConfig, shape: Shape | None, model: str
) -> Iterator[Finding]:
    from sglang_smartgen.core.profile import ProfileError, check_profile, read_profile
    from sglang_smartgen.select.artifact import model_hash

    try:
        profile = read_profile(path)
        made = profile.manifest
        text = "whole; not compared with a model (give --model)"
        if shape is not None:
            check_profile(
                profile,
                selector=config.selector,
                layers=shape.layers,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                model_hash=model_hash(Path(model)),
            )
            text = "whole, and made for this model"
    except ProfileError as problem:
        yield error(SECTION, "profile", str(problem), "make it anew: smartgen profile")
        return
    lengths = f"{made.ranges[0].start} to {made.ranges[-1].stop - 1} tokens"
    yield ok(SECTION, "profile", f"{made.selector} of {made.created}, {lengths}: {text}")


def check_memory(
    config: SmartGenConfig, shape: Shape | None, meminfo: Path = MEMINFO, cgroup: Path = CGROUP
) -> Iterator[Finding]:
    """Whether the prefill store fits, and how many tokens a pool in host memory could hold."""
    left = memory_left(meminfo, cgroup)
    if left is None:
        yield warning("memory", "host", "cannot be read", "look at it by hand: free -g")
        return
    gib = left / (1 << 30)
    yield ok("memory", "host", f"{gib:.1f} GiB are free")
    text = f"store_gb is {config.store_gb:g}, {gib:.1f} GiB are free"
    if config.store_gb > gib:
        mend = "lower store_gb or free memory: pages are taken as prompts come, then P is killed"
        yield error("memory", "store", text, mend)
    elif config.store_gb > 0.5 * gib:
        yield warning("memory", "store", text, "leave at least as much for SGLang and the model")
    else:
        yield ok("memory", "store", text)
    if shape is not None:
        rest = max(0.0, gib - config.store_gb) * (1 << 30)
        tokens = int(config.store_gb * (1 << 30) / shape.token_bytes)
        yield ok("memory", "store holds", f"{tokens} tokens of this model at a time")
        yield ok("memory", "pool", f"{int(rest / shape.token_bytes)} tokens would fit beside it")


def memory_left(meminfo: Path, cgroup: Path) -> int | None:
    """Bytes that may still be used: the machine's, or the container's where that is less."""
    found: list[int] = []
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) << 10)
    except (OSError, ValueError, IndexError):
        pass
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit.isdecimal():
            found.append(int(limit) - int((cgroup / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(0, min(found)) if found else None


def read_shape(folder: Path) -> Shape:
    """Sizes from `config.json`. Raises OSError, ValueError, KeyError or TypeError."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config = {**config, **config.get("text_config", {})}
    q_heads = int(config["num_attention_heads"])
    head_dim = config.get("head_dim") or int(config["hidden_size"]) // q_heads
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return Shape(
        layers=int(config["num_hidden_layers"]),
        q_heads=q_heads,
        kv_heads=int(config.get("num_key_value_heads") or q_heads),
        head_dim=int(head_dim),
        dtype_bytes=FLOAT32_BYTES if "32" in dtype else 2,
    )


def _say(problem: Exception) -> str:
    if isinstance(problem, OSError):
        return problem.strerror or str(problem)
    if isinstance(problem, KeyError):
        return f"config.json has no {problem.args[0]}"
    return f"config.json: {problem}"
