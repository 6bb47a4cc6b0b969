"""Trained hash codes: better than random ones, reproducible, and named as what they are."""

from __future__ import annotations

import functools

import msgspec
import pytest
import select_cases as cases
import torch

from sglang_smartgen.select import (
    Artifact,
    KVShape,
    LayerSample,
    Selector,
    make_selector,
    selector_class,
    top_k,
)
from sglang_smartgen.select.hata import HataSelector

PARTS = ("hash", "query", "centre", "key_scale", "query_scale")
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
def trained(objective: str, score: str = "hamming", steps: int = 60) -> Selector:
    options = {"objective": objective, "score": score, "bits": 64, "steps": steps}
    samples = {0: [sample(300, 1), sample(200, 2)]}
    return make_selector(
        "hata", SHAPE, artifact=cases.artifact_for("hata", SHAPE, samples, options)
    )


def captured(selector: Selector, tokens: int = 400, seed: int = 3) -> float:
    """Share of the attention that 10 % of the entries hold, on a text not trained on."""
    text = sample(tokens, seed)
    metadata = cases.encode(selector, 0, text.keys)
    exact = make_selector("exact", SHAPE)
    shares = []
    for query in text.queries[-8:].view(8, 2, 2, 32):
        truth = exact.score(0, query, text.keys) / 2
        index = top_k(selector.score(0, query, metadata), tokens // 10)
        shares.append(truth.gather(1, index).sum(1).mean())
    return float(torch.stack(shares).mean())


@functools.cache
def random_codes(score: str) -> float:
    return captured(make_selector("hata", SHAPE, options={"bits": 64, "score": score}))


def test_training_beats_random_codes() -> None:
    listwise = captured(trained("listwise"))
    assert listwise > random_codes("hamming") + 0.02
    assert listwise > captured(trained("paper"))


def test_the_estimate_beats_the_hamming_score_with_and_without_training() -> None:
    assert random_codes("estimate") > random_codes("hamming") + 0.02
    start, later = trained("listwise", "estimate", 0), trained("listwise", "estimate")
    for selector in (start, later):
        assert captured(selector) > random_codes("estimate") + 0.05
        assert captured(selector) > captured(trained("listwise"))
    assert captured(later, 300, 1) > captured(start, 300, 1)  # the text it was trained on


@pytest.mark.parametrize("score", ["estimate", "hamming"])
def test_the_same_input_gives_the_same_tensors_and_another_seed_others(score: str) -> None:
    samples = [sample(70, 1)]
    options = {"bits": 32, "steps": 2, "score": score}
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


def test_a_trained_estimate_is_near_the_logits_that_order_the_keys() -> None:
    selector = trained("listwise", "estimate", 0)
    text = sample(300, 9)
    query = text.queries[-1].view(2, 2, 32)
    score = selector.score(0, query, selector.encode(0, text.keys, None))
    logits = torch.einsum("hgd,thd->hgt", query, text.keys) * SHAPE.scaling
    assert selector.artifact is not None
    parts = {name: selector.artifact.tensors[f"{name}.0"].float() for name in PARTS}
    keys = (text.keys - parts["centre"]) * parts["key_scale"]
    projected = torch.einsum("thd,hdr->htr", keys, parts["hash"])
    numbers = torch.einsum("hgd,hdr->hgr", query * parts["query_scale"][:, None], parts["query"])
    signs = projected.sign() * projected.abs().mean(-1, keepdim=True)
    estimate = torch.einsum("hgr,htr->hgt", numbers, signs)
    for head in range(2):
        for g in range(2):
            pair = torch.stack((estimate[head, g], logits[head, g]))
            assert torch.corrcoef(pair)[0, 1] > 0.85
    # The rounding to 8 bits changes little.
    wanted = top_k(torch.softmax(estimate, -1).sum(1), 30)
    for head, row in enumerate(top_k(score, 30)):
        assert len(set(row.tolist()) & set(wanted[head].tolist())) >= 26


def test_reports_name_the_source_of_the_codes_and_the_score() -> None:
    hamming, estimate = trained("listwise"), trained("listwise", "estimate")
    paper, random = trained("paper"), make_selector("hata", SHAPE)
    faithful = make_selector("hata", SHAPE, options={"score": "hamming"})
    assert estimate.describe() == "hata (trained, r=64, score estimate, listwise objective)"
    assert paper.describe() == "hata (trained, r=64, score hamming, paper objective)"
    wanted = "hata (orthogonal random codes, not trained, r=128, score estimate)"
    assert random.describe() == wanted
    made = (hamming, estimate, paper, random, faithful)
    assert len({selector.fingerprint() for selector in made}) == 5


def test_an_artifact_is_used_for_the_score_it_was_made_for() -> None:
    artifact = trained("listwise").artifact
    assert artifact is not None and artifact.manifest.parameters["score"] == "hamming"
    with pytest.raises(ValueError, match="score is 'estimate'; the artifact was made with 'hamm"):
        make_selector("hata", SHAPE, artifact=artifact, options={"score": "estimate"})
    older = msgspec.structs.replace(artifact.manifest, parameters={"bits": 64})
    with pytest.raises(ValueError, match="does not say for which score it was made"):
        make_selector("hata", SHAPE, artifact=Artifact(older, artifact.tensors))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"bits": 48}, "bits is 48; it must be a positive multiple of 32"),
        ({"steps": -1}, "steps is -1; it must be at least 0"),
        ({"steps": 0, "score": "hamming"}, "steps is 0; it must be at least 1"),
        ({"seed": -1}, "seed is -1; allowed are 0 to"),
        ({"score": "cosine"}, "score is 'cosine'; allowed are estimate, hamming"),
        (
            {"objective": "paper"},
            "objective is 'paper'; with score estimate allowed are listwise",
        ),
        (
            {"objective": "mse", "score": "hamming"},
            "objective is 'mse'; with score hamming allowed are listwise, paper",
        ),
        ({"rate": 1.0}, "no option 'rate'; allowed are bits, objective, score, seed, steps"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        selector_class("hata").calibrate(SHAPE, 0, [sample(9, 0)], options)
