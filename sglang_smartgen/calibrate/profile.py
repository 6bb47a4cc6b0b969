"""Recordings of what requests selected in decode, added up to a profile.

Each request counts alike in its range of prompt length, whatever its length and its number of
steps. How alike they are is the paper's positional similarity; here it is a number.
"""

from __future__ import annotations

import zipfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
import torch
from torch import Tensor

from sglang_smartgen.calibrate.errors import CalibrationError
from sglang_smartgen.core.importance import block_importance, rank_correlation, resample
from sglang_smartgen.core.profile import (
    LengthRange,
    Profile,
    ProfileManifest,
    Similarity,
)

SIMILARITY_BLOCKS = 256
"""Blocks a layer at which maps are compared: single tokens of two texts have nothing in common."""

LOW_SIMILARITY = 0.4
"""Below it a profile says little about other texts. Texts of all kinds had .53 to .69 when the
orders were first measured on a small model."""


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What one request selected: counts int32 [sparse_layers, kv_heads, prompt_len].

    data_set: name of what its text is from. prefill_s: seconds of prefill compute. ratio, selector:
    as in the config. bandwidth: measured bytes a second to D, None when unknown.
    """

    name: str
    data_set: str
    counts: Tensor
    steps: int
    prefill_s: float
    selector: str
    ratio: float
    bandwidth: float | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return int(self.counts.shape[2])


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a profile must know of the model, the whole model's numbers. Bytes are of one token."""

    model_hash: str
    layers: int
    kv_heads: int
    head_dim: int
    sparse_layers: list[int]
    token_bytes: int
    metadata_token_bytes: float


def read_recording(path: Path, data_set: str, bandwidth: float | None = None) -> Recording:
    """Read a recording that a decode node wrote.

    Raises CalibrationError, one sentence, when it is missing, damaged or empty.
    """
    try:
        with np.load(path, allow_pickle=False) as content:
            recording = Recording(
                name=path.stem,
                data_set=data_set,
                counts=torch.from_numpy(content["counts"]),
                steps=int(content["steps"]),
                prefill_s=float(content["prefill_s"]),
                selector=str(content["selector"]),
                ratio=float(content["ratio"]),
                bandwidth=bandwidth,
            )
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise CalibrationError(f"recording {path} cannot be read: {error}") from None
    if recording.counts.dim() != 3 or recording.steps < 1 or not bool(recording.counts.any()):
        raise CalibrationError(
            f"recording {path} has counts {list(recording.counts.shape)} of {recording.steps} "
            "steps; it must hold the selections of at least one step"
        )
    return recording


def make_profile(
    recordings: Sequence[Recording],
    ranges: Iterable[tuple[int, int]],
    *,
    model: ModelShape,
    blocks: int,
    text_hash: str,
    versions: dict[str, str],
    created: str,
) -> Profile:
    """Add recordings up to one map for each range `[start, stop)` of prompt tokens.

    A range without a recording is left out. Raises CalibrationError when there is none at all, or
    when recordings differ in selector, ratio or layers.
    """
    if not recordings:
        raise CalibrationError("there are no recordings; a profile needs at least one")
    first = recordings[0]
    for other in recordings:
        if (other.selector, other.ratio) != (first.selector, first.ratio):
            raise CalibrationError(
                f"recording {other.name} is of selector {other.selector} at ratio {other.ratio}; "
                f"{first.name} is of {first.selector} at {first.ratio}, they must be alike"
            )
    maps = {id(recording): _map(recording, model, blocks) for recording in recordings}
    found: list[LengthRange] = []
    groups: list[list[Recording]] = []
    for start, stop in sorted(ranges):
        group = [r for r in recordings if start <= r.prompt_len < stop]
        if group:
            groups.append(group)
            found.append(_length_range(start, stop, group, model))
    if not groups:
        raise CalibrationError("no recording is in any of the ranges of prompt length")
    merged = [torch.stack([maps[id(r)] for r in group]).mean(0) for group in groups]
    manifest = ProfileManifest(
        selector=first.selector,
        ratio=first.ratio,
        blocks=blocks,
        model_hash=model.model_hash,
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        sparse_layers=model.sparse_layers,
        token_bytes=model.token_bytes,
        metadata_token_bytes=model.metadata_token_bytes,
        ranges=found,
        similarity=_similarity(groups, maps, merged, model.sparse_layers),
        text_hash=text_hash,
        versions=versions,
        created=created,
    )
    return Profile(manifest, merged)


def warnings(similarity: Similarity) -> list[str]:
    """Return a sentence for each rank correlation that is too low to trust the profile."""
    said = {
        "texts of one length": similarity.between_texts,
        "data sets": similarity.between_sets,
        "ranges of prompt length": similarity.between_lengths,
    }
    return [
        f"the importance of blocks differs between {what}: rank correlation {value:.2f}, below "
        f"{LOW_SIMILARITY}; order observed depends less on the profile"
        for what, value in said.items()
        if value is not None and value < LOW_SIMILARITY
    ]


def k_r_table(profile: Profile, bandwidths: Sequence[float]) -> list[list[int]]:
    """Return K_r for each range (at its mean length) and each bandwidth in bytes a second."""
    return [
        [profile.proactive_blocks(round(r.prompt_tokens), bandwidth) for bandwidth in bandwidths]
        for r in profile.manifest.ranges
    ]


def _map(recording: Recording, model: ModelShape, blocks: int) -> Tensor:
    """float32 [layers, blocks] of one recording."""
    try:
        importance = block_importance(
            recording.counts,
            recording.steps,
            layers=model.layers,
            blocks=blocks,
            sparse_layers=model.sparse_layers,
        )
    except ValueError as error:
        raise CalibrationError(f"recording {recording.name}: {error}") from None
    return resample(importance, blocks)


def _length_range(start: int, stop: int, group: list[Recording], model: ModelShape) -> LengthRange:
    tokens = fmean(r.prompt_len for r in group)
    speeds = [r.bandwidth for r in group if r.bandwidth]
    bandwidth = fmean(speeds) if speeds else None
    return LengthRange(
        start=start,
        stop=stop,
        prompt_tokens=tokens,
        prefill_s=fmean(r.prefill_s for r in group),
        transfer_s=tokens * model.token_bytes / bandwidth if bandwidth else None,
        bandwidth=bandwidth,
        recordings=len(group),
        steps=sum(r.steps for r in group),
    )


def _similarity(
    groups: list[list[Recording]],
    maps: dict[int, Tensor],
    merged: list[Tensor],
    sparse_layers: list[int],
) -> Similarity:
    def compared(importance: Tensor) -> Tensor:
        blocks = min(SIMILARITY_BLOCKS, importance.shape[1])
        return resample(importance[sparse_layers], blocks)

    coarse = {key: compared(value) for key, value in maps.items()}
    texts = [
        rank_correlation(coarse[id(a)], coarse[id(b)])
        for group in groups
        for a, b in combinations(group, 2)
    ]
    sets: list[float] = []
    for group in groups:
        by_set: dict[str, list[Tensor]] = defaultdict(list)
        for recording in group:
            by_set[recording.data_set].append(coarse[id(recording)])
        means = [torch.stack(members).mean(0) for members in by_set.values()]
        sets += [rank_correlation(a, b) for a, b in combinations(means, 2)]
    lengths = [
        rank_correlation(a, b) for a, b in combinations([compared(value) for value in merged], 2)
    ]
    return Similarity(
        between_texts=fmean(texts) if texts else None,
        between_sets=min(sets, default=None),
        between_lengths=min(lengths, default=None),
    )
