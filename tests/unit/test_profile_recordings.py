"""From recordings to a profile, with recordings that were made up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_smartgen.calibrate.errors import CalibrationError
from sglang_smartgen.calibrate.profile import (
    ModelShape,
    Recording,
    k_r_table,
    make_profile,
    read_recording,
    warnings,
)
from sglang_smartgen.calibrate.profile_map import draw_map
from sglang_smartgen.core.profile import Profile, Similarity, read_profile, write_profile

LAYERS, HEADS, STEPS = 4, 2, 10
MODEL = ModelShape(
    model_hash="abc",
    layers=LAYERS,
    kv_heads=HEADS,
    head_dim=8,
    sparse_layers=[2, 3],
    token_bytes=512,
    metadata_token_bytes=8.0,
)


def recorded(
    name: str, prompt_len: int, data_set: str = "a", seed: int = 0, like: float = 0.9
) -> Recording:
    """Mostly the end of the prompt in layer 2 and its start in layer 3; `like` is how much so."""
    torch.manual_seed(seed)
    place = torch.linspace(0, 1, prompt_len)
    trend = torch.stack([place, 1 - place])[:, None].expand(-1, HEADS, -1)
    share = like * trend + (1 - like) * torch.rand(2, HEADS, prompt_len)
    return Recording(
        name=name,
        data_set=data_set,
        counts=(share * STEPS).round().int(),
        steps=STEPS,
        prefill_s=prompt_len / 200,
        selector="hata",
        ratio=0.1,
    )


def profile_of(recordings: list[Recording], blocks: int = 32) -> Profile:
    return make_profile(
        recordings,
        [(200, 400), (100, 200), (800, 1600)],
        model=MODEL,
        blocks=blocks,
        text_hash="def",
        versions={},
        created="now",
    )


def test_ranges_hold_their_recordings_and_empty_ones_are_left_out() -> None:
    profile = profile_of([recorded("a", 150), recorded("b", 250), recorded("c", 350, seed=1)])
    found = [(r.start, r.stop, r.recordings, r.steps) for r in profile.manifest.ranges]
    assert found == [(100, 200, 1, 10), (200, 400, 2, 20)]
    assert profile.manifest.ranges[1].prompt_tokens == 300
    assert profile.manifest.ranges[1].prefill_s == pytest.approx(1.5)
    late, early = profile.maps[1][2], profile.maps[1][3]
    assert late[-4:].mean() > 0.8 > 0.2 > late[:4].mean()
    assert early[:4].mean() > 0.8 > 0.2 > early[-4:].mean()
    assert not profile.maps[0][:2].any()


def test_every_request_counts_alike() -> None:
    one = recorded("a", 300)
    long = Recording(
        name="b",
        data_set="a",
        counts=torch.zeros_like(one.counts).index_fill_(2, torch.tensor([0]), 1000),
        steps=1000,
        prefill_s=2.0,
        selector="hata",
        ratio=0.1,
    )
    merged = profile_of([one, long], blocks=300).maps[0]
    alone = profile_of([one], blocks=300).maps[0]
    assert merged[2, 0].item() == pytest.approx((alone[2, 0].item() + 1.0) / 2)
    assert merged[2, 1:].allclose(alone[2, 1:] / 2)


def test_similarity_is_high_for_like_and_low_for_unlike_recordings() -> None:
    like = profile_of([recorded(str(i), 150 + 100 * (i % 2), "ab"[i // 2], i) for i in range(4)])
    found = like.manifest.similarity
    assert min(found.between_texts or 0, found.between_sets or 0, found.between_lengths or 0) > 0.8
    assert warnings(found) == []
    unlike = profile_of([recorded(str(i), 150, "ab"[i % 2], i, like=0.0) for i in range(4)])
    sentences = warnings(unlike.manifest.similarity)
    assert unlike.manifest.similarity.between_lengths is None
    assert len(sentences) == 2 and "differs between data sets: rank correlation" in sentences[1]
    assert warnings(Similarity()) == []


def test_k_r_grows_with_the_bandwidth_from_two_layers_to_all() -> None:
    profile = profile_of([recorded("a", 150), recorded("b", 300)])
    # 0.75 * 0.75 s * 80 kB/s, less 1,200 B, in blocks of 600 B; twice the length doubles all.
    assert k_r_table(profile, [0, 80_000, 1e9]) == [[64, 73, 128], [64, 73, 128]]


def test_the_profile_survives_its_file_and_is_drawn(tmp_path: Path) -> None:
    path, picture = tmp_path / "p.safetensors", tmp_path / "map.png"
    profile = profile_of([recorded("a", 150), recorded("b", 300)])
    write_profile(path, profile)
    assert read_profile(path).manifest == profile.manifest
    draw_map(profile, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_recording_is_read_as_decode_wrote_it(tmp_path: Path) -> None:
    made, path = recorded("a", 40), tmp_path / "a.npz"
    facts = {"steps": 10, "rid": "r", "prefill_s": 0.2, "selector": "hata", "ratio": 0.1}
    np.savez(path, counts=made.counts.numpy(), prompt_len=40, **facts)
    read = read_recording(path, "a")
    assert read.counts.equal(made.counts) and (read.steps, read.prompt_len) == (10, 40)
    assert (read.prefill_s, read.selector, read.ratio) == (0.2, "hata", 0.1)
    np.savez(path, counts=np.zeros((2, 2, 40), np.int32), prompt_len=40, **facts)
    with pytest.raises(CalibrationError, match="must hold the selections of at least one step"):
        read_recording(path, "a")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CalibrationError, match=r"recording .*a.npz cannot be read"):
        read_recording(path, "a")
    with pytest.raises(CalibrationError, match="cannot be read"):
        read_recording(tmp_path / "none.npz", "a")


def test_recordings_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(CalibrationError, match="there are no recordings"):
        profile_of([])
    with pytest.raises(CalibrationError, match="no recording is in any of the ranges"):
        profile_of([recorded("a", 50)])
    other = recorded("b", 150)
    for changed in ({"selector": "exact"}, {"ratio": 0.2}):
        fields = {name: getattr(other, name) for name in other.__struct_fields__} | changed
        with pytest.raises(CalibrationError, match=r"recording b is of selector .*must be alike"):
            profile_of([recorded("a", 150), Recording(**fields)])
    with pytest.raises(CalibrationError, match=r"recording a: counts is \[2, 2, 150\]"):
        make_profile(
            [recorded("a", 150)],
            [(100, 200)],
            model=ModelShape(
                model_hash="",
                layers=5,
                kv_heads=2,
                head_dim=8,
                sparse_layers=[2, 3, 4],
                token_bytes=1,
                metadata_token_bytes=1,
            ),
            blocks=8,
            text_hash="",
            versions={},
            created="",
        )
