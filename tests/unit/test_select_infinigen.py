"""InfiniGen: what is chosen offline, what is scored, and the two count policies."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest
import select_cases as cases
import torch

from sglang_smartgen.select import (
    Artifact,
    KVShape,
    LayerSample,
    make_selector,
    selector_class,
    top_k,
)
from sglang_smartgen.select.infinigen import InfinigenSelector
from sglang_smartgen.select.projection import project_keys, project_query

SHAPE = KVShape(layers=1, q_heads=4, kv_heads=2, head_dim=8, scaling=0.5)


def sample(tokens: int = 50, seed: int = 0) -> LayerSample:
    made = torch.Generator().manual_seed(seed)
    return LayerSample(
        torch.randn(tokens, 4, 8, generator=made), torch.randn(tokens, 2, 8, generator=made)
    )


def test_channels_are_those_of_the_largest_queries_and_keys() -> None:
    samples = [sample(50, 0), sample(20, 1)]
    for s in samples:
        s.queries[:, 1, 6] += 9  # one query head of KV head 0
        s.keys[:, 1, 3] -= 9
    made = InfinigenSelector.calibrate(SHAPE, 0, samples, {"width": 0.5})
    queries = torch.cat([s.queries for s in samples]).abs().mean(0)
    keys = torch.cat([s.keys for s in samples]).abs().mean(0)
    for head in range(2):
        weight = (queries[2 * head] + queries[2 * head + 1]) / 2 + keys[head]
        ranked = sorted(range(8), key=lambda d: -float(weight[d]))
        assert made["channels"][head].tolist() == sorted(ranked[:4])
    assert 6 in made["channels"][0] and 3 in made["channels"][1]


def test_skew_keeps_most_of_the_mean_query() -> None:
    one = sample(300)
    one.queries[:, :2] *= torch.tensor([9.0, 1, 1, 1, 1, 1, 1, 0.1])
    one.queries[:, :2] = one.queries[:, :2] @ torch.linalg.qr(torch.randn(8, 8))[0]
    matrix = InfinigenSelector.calibrate(SHAPE, 0, [one], {"mode": "skew"})["matrix"]
    assert matrix.shape == (2, 8, 2)
    torch.testing.assert_close(matrix[0].T @ matrix[0], torch.eye(2), atol=1e-4, rtol=0)
    mean = one.queries[:, :2].mean(1)
    _, _, right = torch.linalg.svd(mean, full_matrices=False)
    assert abs(float(right[0] @ matrix[0, :, 0])) > 0.9999  # up to its sign
    full = InfinigenSelector.calibrate(SHAPE, 0, [one], {"mode": "skew", "width": 1.0})["matrix"]
    logits = torch.einsum("hgd,thd->hgt", one.queries[0].view(2, 2, 8), one.keys)
    query = project_query("skew", full, one.queries[0].view(2, 2, 8))
    found = torch.einsum("hgd,thd->hgt", query, project_keys("skew", full, one.keys))
    torch.testing.assert_close(found, logits, atol=1e-3, rtol=1e-4)  # the whole rotation is exact


@pytest.mark.parametrize("case", ["infinigen-channels", "infinigen-skew"])
def test_score_is_the_softmax_of_partial_logits_at_the_models_scale(case: str) -> None:
    selector = cases.selector_of(case)
    artifact = cases.artifact_of(case)
    assert artifact is not None
    keys, query = cases.keys_of(40, 8), cases.queries_of(1, 8).view(4, 2, 32)
    score = selector.score(3, query, cases.encode(selector, 3, keys))
    for head in range(4):
        if case == "infinigen-channels":
            index = artifact.tensors["channels.3"][head]
            part_q, part_k = query[head][:, index], keys[:, head][:, index]
        else:
            matrix = artifact.tensors["matrix.3"][head]
            part_q, part_k = query[head] @ matrix, keys[:, head] @ matrix
        wanted = torch.softmax(part_q @ part_k.T * 32**-0.5, -1).sum(0)
        torch.testing.assert_close(score[head], wanted, rtol=1e-4, atol=1e-6)


def test_whole_width_is_exact() -> None:
    shape = KVShape(layers=1, q_heads=4, kv_heads=2, head_dim=8, scaling=0.5)
    one = sample()
    artifact = cases.artifact_for("infinigen", shape, {0: [one]}, {"width": 1.0})
    selector = make_selector("infinigen", shape, artifact=artifact)
    exact = make_selector("exact", shape)
    query = one.queries[0].view(2, 2, 8)
    assert torch.equal(
        selector.score(0, query, selector.encode(0, one.keys, None)),
        exact.score(0, query, exact.encode(0, one.keys, None)),
    )


def test_bf16_partial_keys_are_the_pools_own_numbers() -> None:
    selector = cases.selector_of("infinigen-channels", dtype=torch.bfloat16)
    artifact = cases.artifact_of("infinigen-channels")
    assert artifact is not None
    keys = cases.keys_of(9, 1, torch.bfloat16)
    metadata = cases.encode(selector, 2, keys)
    assert metadata.dtype == torch.bfloat16 and metadata.shape == (9, 4, 8)
    for head in range(4):
        assert torch.equal(metadata[:, head], keys[:, head, artifact.tensors["channels.2"][head]])


def test_alpha_cuts_each_head_at_its_own_count() -> None:
    selector = cases.selector_of("infinigen-alpha")
    artifact = cases.artifact_of("infinigen-alpha")
    assert artifact is not None
    keys, query = cases.keys_of(200, 3), 2 * cases.queries_of(1, 3).view(4, 2, 32)
    score = selector.score(2, query, cases.encode(selector, 2, keys))
    cap = 30
    index = selector.pick(score, cap)
    assert index.shape == (4, cap)
    counts = []
    for head, row in enumerate(index.tolist()):
        channels = artifact.tensors["channels.2"][head]
        logits = query[head][:, channels] @ keys[:, head][:, channels].T * 32**-0.5
        near = (logits - logits.amax(1, keepdim=True) > -2).any(0)  # on the union of the group
        count = min(int(near.sum()), cap)
        counts.append(count)
        assert row == [*top_k(score, cap if count == cap else count)[head].tolist()] + [-1] * (
            cap - count
        )
    assert min(counts) >= 1 and min(counts) < cap  # or the cut was not seen
    # The cap acts, and a single best entry is always taken.
    assert bool((selector.pick(score, 1) >= 0).all())
    assert torch.equal(
        selector.pick(score[:, :5] - 100 * (torch.arange(5) > 0), 3)[:, 1:] >= 0,
        torch.zeros(4, 2, dtype=torch.bool),
    )


def test_alpha_of_one_request_does_not_see_another() -> None:
    selector = cases.selector_of("infinigen-alpha")
    score = torch.tensor([[0.0, -1.0, -3.0, -0.5]] * 4)
    assert selector.pick(score, 3).tolist() == [[0, 1, 3]] * 4
    assert selector.pick(score, 2).tolist() == [[0, 3]] * 4
    score[1, 1:] = -9
    assert selector.pick(score, 3).tolist() == [[0, 1, 3], [0, -1, -1], [0, 1, 3], [0, 1, 3]]


def test_a_foreign_parameter_in_a_manifest_is_named() -> None:
    artifact = cases.artifact_of("infinigen-channels")
    assert artifact is not None
    manifest = msgspec.structs.replace(artifact.manifest, parameters={"width": "x"})
    with pytest.raises(ValueError, match="width is 'x'; it must be a float"):
        make_selector("infinigen", cases.WHOLE, artifact=Artifact(manifest, artifact.tensors))
    manifest = msgspec.structs.replace(artifact.manifest, parameters={"width": 0.5})
    with pytest.raises(ValueError, match=r"channels of layer 2 is \[4, 8\]; it must be \[4, 16\]"):
        make_selector("infinigen", cases.WHOLE, artifact=Artifact(manifest, artifact.tensors))


def test_names_for_reports_and_fingerprints_tell_what_differs() -> None:
    described = {case: cases.selector_of(case).describe() for case in cases.CASES}
    assert described["infinigen-channels"] == "infinigen (channels, 8 of 32 dims)"
    assert described["infinigen-skew"] == "infinigen (skew, 16 of 32 dims)"
    assert described["infinigen-alpha"] == "infinigen (channels, 16 of 32 dims, alpha 2)"
    prints = {cases.selector_of(case).fingerprint() for case in cases.CASES}
    prints |= {cases.selector_of("infinigen-channels", 1, 2).fingerprint()}
    prints |= {cases.selector_of("infinigen-channels", dtype=torch.bfloat16).fingerprint()}
    assert len(prints) == len(cases.CASES) + 2


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: make_selector("infinigen", SHAPE),
            "selector infinigen needs an artifact of this model and none was given",
        ),
        (
            lambda: make_selector(
                "hata", cases.WHOLE, artifact=cases.artifact_of("infinigen-skew")
            ),
            "the artifact is for selector infinigen; this selector is hata",
        ),
        (
            lambda: cases.selector_of("infinigen-skew").encode(1, cases.keys_of(2, 0), None),
            "layer is 1; the artifact has layers 2, 3",
        ),
        (
            lambda: make_selector(
                "infinigen",
                cases.WHOLE,
                artifact=cases.artifact_of("infinigen-skew"),
                options={"width": 0.25},
            ),
            "width is 0.25; the artifact was made with 0.5",
        ),
        (
            lambda: make_selector(
                "infinigen",
                cases.WHOLE,
                artifact=cases.artifact_of("infinigen-channels"),
                options={"policy": "mean"},
            ),
            "policy is 'mean'; allowed are ratio, alpha",
        ),
        (
            lambda: make_selector(
                "infinigen",
                cases.WHOLE,
                artifact=cases.artifact_of("infinigen-channels"),
                options={"policy": "alpha", "alpha": -1},
            ),
            "alpha is -1.0; it must be above 0",
        ),
        (
            lambda: make_selector(
                "infinigen",
                cases.WHOLE,
                artifact=cases.artifact_of("infinigen-channels"),
                first_kv_head=2,
            ),
            "the artifact has 4 KV heads; this rank needs heads 2 to 5",
        ),
        (
            lambda: InfinigenSelector.calibrate(SHAPE, 0, [sample()], {"alpha": 3.0}),
            "selector infinigen has no option 'alpha'; allowed are mode, width",
        ),
        (
            lambda: InfinigenSelector.calibrate(SHAPE, 0, [sample()], {"width": "wide"}),
            "width is 'wide'; it must be a float",
        ),
        (
            lambda: InfinigenSelector.calibrate(SHAPE, 0, [sample()], {"width": 1.5}),
            "width is 1.5; it must be above 0 and at most 1",
        ),
        (
            lambda: InfinigenSelector.calibrate(SHAPE, 0, [sample()], {"mode": "svd"}),
            "mode is 'svd'; allowed are channels, skew",
        ),
        (
            lambda: InfinigenSelector.calibrate(SHAPE, 0, [], {}),
            "samples is empty; calibration needs at least one text",
        ),
        (
            lambda: InfinigenSelector.calibrate(
                SHAPE, 0, [LayerSample(sample().queries[:, :2], sample().keys)], {}
            ),
            "queries is [50, 2, 8]; it must be [T, 4, 8]",
        ),
        (
            lambda: selector_class("exact").calibrate(SHAPE, 0, [sample()], {}),
            "selector exact has nothing to calibrate",
        ),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        call()
