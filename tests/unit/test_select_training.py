"""Trained hash codes: better than random ones, reproducible, and named as what they are."""

from __future__ import annotations

import functools

import pytest
import select_cases as cases
import torch

from sglang_smartgen.select import (
    KVShape,
    LayerSample,
    Selector,
    make_selector,
    selector_class,
    top_k,
)
from sglang_smartgen.select.hata import HataSelector

SHAPE = KVShape(layers=1, q_heads=4, kv_heads=2, head_dim=32, scaling=32**-0.5)


def sample(tokens: int, seed: int) -> LayerSample:
    """Queries look at few of the directions that keys spread over: what training can learn."""
    made = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(7)
    size = torch.linspace(2, 0.05, 32)
    keys = torch.randn(tokens, 2, 32, generator=made) * size.flip(0)
    keys += 3 * torch.randn(2, 32, generator=fixed)
    queries = 6 * torch.randn(tokens, 4, 32, generator=made) * size
    return LayerSample(queries, keys)


@functools.cache
def trained(objective: str) -> Selector:
    options = {"objective": objective, "bits": 64, "steps": 60}
    samples = {0: [sample(300, 1), sample(200, 2)]}
    return make_selector(
        "hata", SHAPE, artifact=cases.artifact_for("hata", SHAPE, samples, options)
    )


def captured(selector: Selector) -> float:
    """Share of the attention that 10 % of the entries hold, on a text not trained on."""
    text = sample(400, 3)
    metadata = cases.encode(selector, 0, text.keys)
    exact = make_selector("exact", SHAPE)
    shares = []
    for query in text.queries[-8:].view(8, 2, 2, 32):
        truth = exact.score(0, query, text.keys) / 2
        index = top_k(selector.score(0, query, metadata), 40)
        shares.append(truth.gather(1, index).sum(1).mean())
    return float(torch.stack(shares).mean())


def test_training_beats_random_codes() -> None:
    random = captured(make_selector("hata", SHAPE, options={"bits": 64}))
    listwise = captured(trained("listwise"))
    assert listwise > random + 0.02
    assert listwise > captured(trained("paper"))


def test_the_same_input_gives_the_same_tensors_and_another_seed_others() -> None:
    samples = [sample(70, 1)]
    options = {"bits": 32, "steps": 2}
    first, again = (HataSelector.calibrate(SHAPE, 0, samples, options) for _ in range(2))
    assert first["hash"].dtype == torch.int8 and first["hash"].shape == (2, 32, 32)
    assert first["centre"].dtype == torch.float32 and first["centre"].shape == (2, 32)
    assert all(torch.equal(first[key], again[key]) for key in first)
    other = HataSelector.calibrate(SHAPE, 0, samples, {**options, "seed": 5})
    assert not torch.equal(first["hash"], other["hash"])


def test_a_very_short_text_trains_too() -> None:
    made = HataSelector.calibrate(SHAPE, 0, [sample(1, 1)], {"bits": 32, "steps": 1})
    assert bool(torch.isfinite(made["centre"]).all())


def test_a_trained_selector_needs_no_anchor_and_hashes_as_the_artifact_says() -> None:
    selector = trained("listwise")
    assert selector.anchor_tokens == 0 and selector.metadata_width == 3
    keys = sample(5, 9).keys
    metadata = selector.encode(0, keys, None)
    assert selector.artifact is not None
    matrix = selector.artifact.tensors["hash.0"].float()
    centre = selector.artifact.tensors["centre.0"]
    torch.testing.assert_close(
        metadata[..., -1].contiguous().view(torch.float32),
        (keys - centre).norm(dim=-1),
        rtol=0.01,
        atol=0,
    )
    signs = torch.einsum("thd,hdr->thr", keys - centre, matrix) > 0
    for t in range(5):
        for head in range(2):
            code = int.from_bytes(metadata[t, head, :-1].numpy().tobytes(), "little")
            plain = sum(1 << j for j in range(64) if signs[t, head, j])
            assert (code ^ plain).bit_count() <= 4  # the 8-bit rounding moves the odd bit


def test_reports_name_the_source_of_the_codes() -> None:
    assert trained("listwise").describe() == "hata (trained, r=64, listwise objective)"
    assert trained("paper").describe() == "hata (trained, r=64, paper objective)"
    random = make_selector("hata", SHAPE)
    assert random.describe() == "hata (orthogonal random codes, not trained, r=128)"
    prints = {s.fingerprint() for s in (trained("listwise"), trained("paper"), random)}
    assert len(prints) == 3


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"bits": 48}, "bits is 48; it must be a positive multiple of 32"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"seed": -1}, "seed is -1; allowed are 0 to"),
        ({"objective": "mse"}, "objective is 'mse'; allowed are listwise, paper"),
        ({"rate": 1.0}, "no option 'rate'; allowed are bits, objective, seed, steps"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        selector_class("hata").calibrate(SHAPE, 0, [sample(9, 0)], options)
