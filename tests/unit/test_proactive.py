"""K_r from prefill time and bandwidth."""

from __future__ import annotations

import math

import pytest

from sglang_smartgen.core.proactive import proactive_blocks

MODEL = {"layers": 10, "blocks": 100, "block_bytes": 1000.0}


def k_r(prefill_s: float, bandwidth: float, metadata_bytes: float = 0.0) -> int:
    return proactive_blocks(
        prefill_s=prefill_s, bandwidth=bandwidth, metadata_bytes=metadata_bytes, **MODEL
    )


def test_the_time_of_all_layers_but_the_first_is_used_and_metadata_charged() -> None:
    # 0.9 * 2 s * 250 kB/s = 450 kB = 450 blocks.
    assert k_r(2.0, 250_000) == 450
    assert k_r(2.0, 250_000, metadata_bytes=50_000) == 400


def test_clipped_to_two_layers_and_everything() -> None:
    assert k_r(2.0, 10) == 200
    assert k_r(2.0, 250_000, metadata_bytes=1e9) == 200
    assert k_r(2.0, 1e9) == 1000
    assert k_r(2.0, math.inf) == 1000
    assert k_r(0.0, math.inf) == 200


@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_bad_numbers_are_named(bad: float) -> None:
    with pytest.raises(ValueError, match=r"bandwidth is .*; it must be 0 or more"):
        k_r(1.0, bad)
    with pytest.raises(ValueError, match="block_bytes is 0; it must be positive"):
        proactive_blocks(
            prefill_s=1, bandwidth=1, metadata_bytes=0, block_bytes=0, layers=2, blocks=1
        )
