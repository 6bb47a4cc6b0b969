"""The profile: importance of every block and prefill time by range of prompt length, in one file.

`smartgen profile` writes it, prefill reads it at its start. It is a sealed file: one map
`importance.<i>` a range, float32 [layers, M], and a manifest that says for which model, selector
and settings it was recorded.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from sglang_smartgen.core.importance import resample
from sglang_smartgen.core.proactive import proactive_blocks
from sglang_smartgen.core.sealed import Seal

FORMAT = 1


class ProfileError(ValueError):
    """A profile that cannot be used; its text is one sentence for the user."""


class LengthRange(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of prompts of `start` to `stop - 1` tokens.

    prompt_tokens: their mean length. prefill_s: T_p, mean seconds of prefill compute. transfer_s:
    T_t, seconds that the whole KV takes at `bandwidth` bytes a second, both None where no
    transfer was measured. recordings, steps: requests, and decode steps of all of them.
    """

    start: int
    stop: int
    prompt_tokens: float
    prefill_s: float
    transfer_s: float | None = None
    bandwidth: float | None = None
    recordings: int
    steps: int


class Similarity(msgspec.Struct, frozen=True, kw_only=True):
    """Rank correlation of the importance of blocks, None where there is only one of a kind.

    between_texts: mean over pairs of requests of one range. between_sets: the lowest of two data
    sets. between_lengths: the lowest of two ranges.
    """

    between_texts: float | None = None
    between_sets: float | None = None
    between_lengths: float | None = None


class ProfileManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Where a profile is from.

    selector, ratio: as in the config. blocks: M of the maps. metadata_token_bytes, token_bytes:
    what one token takes in all layers, as selector metadata and as KV. sparse_layers: the layers
    that were selected from. versions: of the packages that recorded it. created: ISO 8601.
    """

    format: int = FORMAT
    selector: str
    ratio: float
    blocks: int
    model_hash: str
    layers: int
    kv_heads: int
    head_dim: int
    sparse_layers: list[int]
    token_bytes: int
    metadata_token_bytes: float
    ranges: list[LengthRange]
    similarity: Similarity
    text_hash: str
    versions: dict[str, str]
    created: str


class Profile(msgspec.Struct, frozen=True):
    """A manifest and one importance map a range, float32 [layers, M] of frequencies 0 to 1.

    The rows of dense layers are 0.
    """

    manifest: ProfileManifest
    maps: list[Tensor]

    def range_of(self, prompt_len: int) -> int:
        """Return the index of the range of a prompt; the nearest one when it is in none."""

        def distance(i: int) -> int:
            r = self.manifest.ranges[i]
            return max(r.start - prompt_len, prompt_len - (r.stop - 1), 0)

        return min(range(len(self.maps)), key=distance)

    def importance_for(self, prompt_len: int, layers: int, per_layer: int) -> Tensor:
        """Return the importance of this prompt's blocks: float32 [layers, per_layer].

        per_layer: `min(M, prompt_len)`. Raises ProfileError for another number of layers.
        """
        if layers != self.manifest.layers:
            raise ProfileError(
                f"the profile was made for {self.manifest.layers} layers; here are {layers}"
            )
        return resample(self.maps[self.range_of(prompt_len)], per_layer)

    def prefill_s(self, prompt_len: int) -> float:
        """Return T_p of a prompt in seconds, linear between the measured lengths.

        Below the shortest and above the longest the time a token stays.
        """
        points = sorted((r.prompt_tokens, r.prefill_s) for r in self.manifest.ranges)
        if prompt_len <= points[0][0]:
            return points[0][1] * prompt_len / points[0][0]
        for (before, early), (after, late) in pairwise(points):
            if prompt_len <= after:
                return early + (late - early) * (prompt_len - before) / (after - before)
        return points[-1][1] * prompt_len / points[-1][0]

    def proactive_blocks(
        self, prompt_len: int, bandwidth: float, prefill_s: float | None = None
    ) -> int:
        """Return K_r for a prompt and a bandwidth in bytes a second, in blocks of this prompt.

        prefill_s replaces the profile's T_p where the prefill's own speed is known.
        """
        m = self.manifest
        per_layer = min(m.blocks, prompt_len)
        return proactive_blocks(
            prefill_s=self.prefill_s(prompt_len) if prefill_s is None else prefill_s,
            bandwidth=bandwidth,
            metadata_bytes=m.metadata_token_bytes * prompt_len,
            block_bytes=m.token_bytes * prompt_len / (m.layers * per_layer),
            layers=m.layers,
            blocks=per_layer,
            dense_layers=m.layers - len(m.sparse_layers),
        )


_SEAL = Seal(
    noun="profile",
    command="smartgen profile",
    key="smartgen_profile",
    manifest=ProfileManifest,
    format=FORMAT,
    error=ProfileError,
)


def write_profile(path: Path, profile: Profile) -> None:
    """Write the file, whole or not at all. Raises ProfileError for maps that do not fit."""
    _check_maps(profile, path)
    tensors = {f"importance.{i}": value for i, value in enumerate(profile.maps)}
    _SEAL.write(path, profile.manifest, tensors)


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises ProfileError, one sentence, for a foreign or damaged file."""
    manifest, tensors = _SEAL.read(path)
    wanted = [f"importance.{i}" for i in range(len(manifest.ranges))]
    if sorted(tensors) != sorted(wanted):
        raise ProfileError(
            f"profile {path} has the maps {sorted(tensors)}; its manifest names {wanted}"
        )
    profile = Profile(manifest, [tensors[name] for name in wanted])
    _check_maps(profile, path)
    return profile


def check_profile(
    profile: Profile,
    *,
    selector: str,
    layers: int,
    kv_heads: int,
    head_dim: int,
    model_hash: str | None = None,
) -> None:
    """Raise ProfileError, one sentence, unless the profile fits selector and model.

    kv_heads: the whole model's. model_hash None skips the comparison of the weights. Another
    ratio than the recorded one is allowed: it changes how much is selected more than what.
    """
    wanted: dict[str, object] = {
        "selector": selector,
        "layers": layers,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
    }
    if model_hash is not None:
        wanted["model_hash"] = model_hash
    for field, value in wanted.items():
        made = getattr(profile.manifest, field)
        if made != value:
            raise ProfileError(f"the profile was made for {field} {made}; here it is {value}")


def _check_maps(profile: Profile, path: Path) -> None:
    m = profile.manifest
    if not m.ranges or len(profile.maps) != len(m.ranges):
        raise ProfileError(
            f"profile {path} has {len(profile.maps)} maps for {len(m.ranges)} ranges; "
            "allowed is one each, at least one"
        )
    for i, value in enumerate(profile.maps):
        if value.shape != (m.layers, m.blocks) or value.dtype != torch.float32:
            raise ProfileError(
                f"profile {path}: map {i} is {value.dtype} {list(value.shape)}; "
                f"it must be float32 {[m.layers, m.blocks]}"
            )
        if not bool(torch.isfinite(value).all()):
            raise ProfileError(f"profile {path}: map {i} holds values that are not finite")
