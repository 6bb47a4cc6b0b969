"""The profile's file: what is written is read, and what cannot be used is refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from sglang_smartgen.core.profile import (
    LengthRange,
    Profile,
    ProfileError,
    ProfileManifest,
    Similarity,
    check_profile,
    read_profile,
    write_profile,
)


def make_profile() -> Profile:
    ranges = [
        LengthRange(
            start=1024, stop=2048, prompt_tokens=1500.0, prefill_s=6.0, recordings=4, steps=192
        ),
        LengthRange(
            start=4096, stop=8192, prompt_tokens=6000.0, prefill_s=30.0, recordings=4, steps=192
        ),
    ]
    manifest = ProfileManifest(
        selector="hata",
        ratio=0.1,
        blocks=16,
        model_hash="abc",
        layers=4,
        kv_heads=2,
        head_dim=8,
        sparse_layers=[2, 3],
        token_bytes=512,
        metadata_token_bytes=16.0,
        ranges=ranges,
        similarity=Similarity(between_texts=0.6),
        text_hash="def",
        versions={"sglang-smartgen": "0.1.0"},
        created="2026-01-01T00:00:00Z",
    )
    torch.manual_seed(0)
    maps = [torch.rand(4, 16), torch.rand(4, 16)]
    return Profile(manifest, maps)


def written(tmp_path: Path) -> Path:
    path = tmp_path / "profile.safetensors"
    write_profile(path, make_profile())
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    profile = read_profile(written(tmp_path))
    assert profile.manifest == make_profile().manifest
    assert all(a.equal(b) for a, b in zip(profile.maps, make_profile().maps, strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["profile.safetensors"]


def test_a_prompt_gets_the_map_of_its_range_or_the_nearest() -> None:
    profile = make_profile()
    asked = {1: 0, 1024: 0, 2047: 0, 2100: 0, 3900: 1, 4096: 1, 100_000: 1}
    assert {length: profile.range_of(length) for length in asked} == asked
    assert profile.importance_for(1500, 4, 16).equal(profile.maps[0])
    short = profile.importance_for(8, 4, 8)
    assert short.shape == (4, 8)
    assert short[2, 0].item() == pytest.approx(profile.maps[0][2, :2].mean().item())
    with pytest.raises(ProfileError, match="made for 4 layers; here are 5"):
        profile.importance_for(1500, 5, 16)


def test_prefill_time_and_k_r_follow_length_and_bandwidth() -> None:
    profile = make_profile()
    times = [profile.prefill_s(n) for n in (750, 1500, 3750, 6000, 12000)]
    assert times == pytest.approx([3.0, 6.0, 18.0, 30.0, 60.0])
    # 0.75 * 6 s * 150 kB/s = 675,000 B, less 24,000 B of metadata; a block is 12,000 B.
    assert profile.proactive_blocks(1500, 150_000) == 54
    assert profile.proactive_blocks(1500, 150_000, prefill_s=3.0) == 32  # two whole layers
    assert profile.proactive_blocks(1500, 1e9) == 64


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[-3] ^= 1
    for data, cause in (
        (bytes(flipped), "is damaged: its contents do not match"),
        (content[:-10], "is damaged or no safetensors file"),
        (b"not a profile", "is damaged or no safetensors file"),
        (content.replace(b"hata", b"heta"), "is damaged: its contents do not match"),
    ):
        path.write_bytes(data)
        with pytest.raises(ProfileError, match=cause):
            read_profile(path)
    with pytest.raises(ProfileError, match="No such file"):
        read_profile(tmp_path / "none")


def test_another_format_or_none_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path, profile = tmp_path / "p", make_profile()
    newer = msgspec.structs.replace(profile.manifest, format=2)
    write_profile(path, Profile(newer, profile.maps))
    with pytest.raises(ProfileError, match="has format 2; this version reads 1"):
        read_profile(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ProfileError, match="is not one of `smartgen profile`"):
        read_profile(path)
    save_file({"x": torch.zeros(1)}, path, metadata={"smartgen_profile": '{"format": 1}'})
    with pytest.raises(ProfileError, match="has a damaged manifest"):
        read_profile(path)


def test_maps_that_do_not_fit_are_not_written(tmp_path: Path) -> None:
    manifest = make_profile().manifest
    good = make_profile().maps
    for maps, cause in (
        (good[:1], "has 1 maps for 2 ranges"),
        (
            [good[0], good[1][:, :3]],
            r"map 1 is torch.float32 \[4, 3\]; it must be float32 \[4, 16\]",
        ),
        ([good[0], good[1] / 0], "map 1 holds values that are not finite"),
    ):
        with pytest.raises(ProfileError, match=cause):
            write_profile(tmp_path / "p", Profile(manifest, maps))
    assert not list(tmp_path.iterdir())


def test_a_profile_of_another_model_or_selector_is_refused() -> None:
    profile = make_profile()
    fits = {"selector": "hata", "layers": 4, "kv_heads": 2, "head_dim": 8}
    check_profile(profile, **fits)
    check_profile(profile, **fits, model_hash="abc")
    for field, value in (("selector", "exact"), ("layers", 5), ("model_hash", "xyz")):
        with pytest.raises(ProfileError, match=f"made for {field} .*; here it is {value}"):
            check_profile(profile, **(fits | {field: value}))
