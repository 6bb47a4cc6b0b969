"""Selectors against naive references: what they score, and that nodes and chunks agree."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch

from sglang_smartgen.select import KVShape, budget, make_selector, top_k
from sglang_smartgen.select.codes import device_sums, hash_matrix, pack_bits, signed_sums
from sglang_smartgen.select.exact import ExactSelector
from sglang_smartgen.select.hata import SINK_TOKENS, HataSelector

HAMMING = {"score": "hamming"}
SHAPE = KVShape(layers=3, q_heads=6, kv_heads=2, head_dim=64, scaling=0.125)


def keys_of(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random keys around a large common mean, as post-RoPE keys are."""
    generator = torch.Generator().manual_seed(seed)
    mean = 3 * torch.randn(2, 64, generator=generator)
    return (torch.randn(tokens, 2, 64, generator=generator) + mean).to(dtype)


def query_of(seed: int = 1) -> torch.Tensor:
    return torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(seed))


def test_exact_score_is_the_attention_summed_over_the_group() -> None:
    selector, keys, query = ExactSelector(SHAPE), keys_of(40), query_of()
    score = selector.score(2, query, selector.encode(2, keys, None))
    for head in range(2):
        wanted = sum(
            torch.softmax(torch.stack([q @ k[head] * SHAPE.scaling for k in keys]), 0)
            for q in query[head]
        )
        torch.testing.assert_close(score[head], wanted)


def test_exact_metadata_is_the_pool_dtype() -> None:
    selector = make_selector("exact", SHAPE, torch.bfloat16)
    keys = keys_of(5, dtype=torch.bfloat16)
    metadata = selector.encode(0, keys, None)
    assert (metadata.dtype, metadata.shape[-1]) == (torch.bfloat16, selector.metadata_width)
    assert torch.equal(metadata, keys) and metadata.data_ptr() != keys.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["estimate", "hamming"])
def test_hata_codes_do_not_depend_on_the_chunks(dtype: torch.dtype, name: str) -> None:
    selector = HataSelector(SHAPE, options={"score": name})
    keys = keys_of(700, dtype=dtype)
    anchor = keys[: selector.anchor_tokens]
    whole = selector.encode(1, keys, anchor)
    random = np.random.default_rng(3)
    for _ in range(5):
        edges = [0, *sorted(random.choice(np.arange(1, 700), 12, replace=False).tolist()), 700]
        pieces = [selector.encode(1, keys[a:b], anchor) for a, b in pairwise(edges)]
        assert torch.equal(torch.cat(pieces), whole)
    single = [selector.encode(1, keys[t : t + 1], anchor) for t in range(0, 700, 31)]
    assert torch.equal(torch.cat(single), whole[::31])
    strided = keys.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(selector.encode(1, strided, anchor), whole)


def test_hata_hamming_score_follows_the_formula() -> None:
    selector, keys, query = HataSelector(SHAPE, options=HAMMING), keys_of(300), query_of()
    anchor = keys[:128]
    metadata = selector.encode(1, keys, anchor)
    score = selector.score(1, query, metadata)
    centred = keys - anchor[SINK_TOKENS:].mean(0)
    norm = metadata[..., -1].contiguous().view(torch.float32)
    torch.testing.assert_close(norm, centred.norm(dim=-1), rtol=1e-2, atol=0)
    for head in range(2):
        matrix = torch.from_numpy(hash_matrix(64, 128, (0x5EED, 1, head)))
        key_bits = metadata[:, head, :-1]
        for n in range(0, 300, 17):
            code = int.from_bytes(key_bits[n].numpy().tobytes(), "little")
            signs = (centred[n, head] @ matrix) > 0
            plain = sum(1 << j for j in range(128) if signs[j])
            assert (code ^ plain).bit_count() <= 4  # the 8-bit rounding moves the odd bit
            similarity = 0.0
            for q in query[head]:
                q_code = int.from_bytes(
                    pack_bits((q / q.abs().max() * 255).round() @ matrix > 0).numpy().tobytes(),
                    "little",
                )
                similarity += 1 - 2 * (code ^ q_code).bit_count() / 128
            assert score[head, n].item() == pytest.approx(
                norm[n, head].item() * similarity, rel=1e-6
            )


def test_hata_estimate_follows_the_formula() -> None:
    selector, keys, query = HataSelector(SHAPE), keys_of(300), 2 * query_of()
    metadata = selector.encode(1, keys, keys[:128])
    score = selector.score(1, query, metadata)
    centred = keys - keys[SINK_TOKENS:128].mean(0)
    for head in range(2):
        matrix = torch.from_numpy(hash_matrix(64, 128, (0x5EED, 1, head)))
        matrix /= matrix.norm(dim=0).square().mean().sqrt()  # columns near unit length
        projected = centred[:, head] @ matrix
        signs = projected.sign() * projected.abs().mean(-1, keepdim=True)
        logits = query[head] @ matrix @ signs.T * (64 / 128 * SHAPE.scaling)
        wanted = torch.softmax(logits, -1).sum(0)
        assert float((score[head] - wanted).abs().sum()) < 0.15  # of 3, the mass of a group
        true = torch.softmax(query[head] @ keys[:, head].T * SHAPE.scaling, -1).sum(0)
        assert torch.corrcoef(torch.stack((score[head], true)))[0, 1] > 0.6


def test_signed_sums_are_exact_and_their_paths_agree() -> None:
    random = np.random.default_rng(5)
    for heads, group, bits, tokens in ((2, 3, 128, 77), (1, 1, 32, 1), (3, 4, 512, 9)):
        sign = random.integers(0, 2, (tokens, heads, bits))
        numbers = random.integers(-255, 256, (heads, group, bits))
        numbers[0, 0] = 255  # the largest sum there is
        code = pack_bits(torch.from_numpy(sign > 0))
        wanted = np.einsum("hgr,nhr->hgn", numbers, 2 * sign - 1)
        floats = torch.from_numpy(numbers).float()
        assert torch.equal(signed_sums(floats, code).long(), torch.from_numpy(wanted))
        assert torch.equal(device_sums(floats, code), signed_sums(floats, code))
        # Columns of the metadata, with the size behind them, are read as they lie.
        wide = torch.cat((code, code[..., :1]), -1)
        assert torch.equal(signed_sums(floats, wide[..., :-1]), signed_sums(floats, code))
        across = code.movedim(-1, 0).contiguous().movedim(0, -1)
        assert torch.equal(signed_sums(floats, across), signed_sums(floats, code))


def test_hata_score_without_numpy_popcount_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    selector, keys, query = HataSelector(SHAPE, options=HAMMING), keys_of(333), query_of()
    metadata = selector.encode(0, keys, keys[:128])
    fast = selector.score(0, query, metadata)
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    assert torch.equal(selector.score(0, query, metadata), fast)


def test_hata_finds_what_exact_finds_better_than_chance() -> None:
    keys, query = keys_of(1000), 3 * query_of()
    exact, hata = ExactSelector(SHAPE), HataSelector(SHAPE)
    score = exact.score(0, query, exact.encode(0, keys, None))
    index = top_k(hata.score(0, query, hata.encode(0, keys, keys[:128])), 100)
    captured = score.gather(1, index).sum() / score.sum()
    best = score.gather(1, top_k(score, 100)).sum() / score.sum()
    assert best > 0.8  # the queries are hot enough for a choice to matter
    assert captured > 0.4  # chance is 0.1


def test_hash_matrix_is_near_orthogonal_and_fixed() -> None:
    matrix = hash_matrix(64, 128, (1, 2, 3))
    for rotation in (matrix[:, :64], matrix[:, 64:]):
        gram = rotation.T @ rotation / np.square(rotation).sum(0).mean()
        assert np.abs(gram - np.eye(64)).max() < 0.05
    assert hash_matrix(128, 32, (1, 2, 3)).shape == (128, 32)
    assert not np.array_equal(matrix, hash_matrix(64, 128, (1, 2, 4)))
    assert np.abs(matrix).max() == 127 and np.array_equal(matrix, np.round(matrix))
    assert matrix[0, :4].tolist() == [
        -41,
        23,
        3,
        26,
    ]  # the stream must never change: nodes would differ


def test_fingerprint_is_the_same_in_another_process_and_differs_by_what_matters() -> None:
    code = (
        "from sglang_smartgen.select import KVShape, make_selector;"
        "print(make_selector('hata', KVShape(3, 6, 2, 64, 0.125)).fingerprint())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = make_selector("hata", SHAPE).fingerprint()
    assert run.stdout.strip() == here
    others = {
        HataSelector(SHAPE, options={"bits": 64}).fingerprint(),
        HataSelector(SHAPE, options=HAMMING).fingerprint(),
        HataSelector(KVShape(4, 6, 2, 64, 0.125)).fingerprint(),
        make_selector("exact", SHAPE).fingerprint(),
        make_selector("exact", SHAPE, torch.bfloat16).fingerprint(),
    }
    assert len(others | {here}) == 6


def test_top_k_is_ascending_and_recent_wins_ties() -> None:
    score = torch.tensor([[1.0, 3.0, 1.0, 1.0, -2.0], [0.0, -0.0, 0.0, -1.0, -0.0]])
    assert top_k(score, 3).tolist() == [[1, 2, 3], [1, 2, 4]]
    assert top_k(score, 1).tolist() == [[1], [4]]


@pytest.mark.parametrize("levels", [2, 5, 10_000])
def test_top_k_equals_a_sort_by_score_then_position(levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    score = torch.randint(-levels, levels, (3, 257), generator=generator).float() / 7
    score[0, 5], score[1, 6] = float("inf"), float("-inf")
    for k in (1, 2, 100, 256, 257, 300):
        for head, row in enumerate(top_k(score, k).tolist()):
            ranked = sorted(range(257), key=lambda n: (score[head, n].item(), n), reverse=True)
            assert row == sorted(ranked[:k])


def test_top_k_paths_agree() -> None:
    from sglang_smartgen.select.topk import _device_path

    score = torch.randint(-4, 4, (3, 500)).float()
    assert torch.equal(_device_path(score, 50), top_k(score, 50))


def test_budget_rounds_up_and_stays_inside_the_prompt() -> None:
    assert [budget(1000, 0.1), budget(1001, 0.1), budget(3, 0.01), budget(7, 1)] == [100, 101, 1, 7]
    for ratio in (0, -0.1, 1.5):
        with pytest.raises(ValueError, match="ratio is"):
            budget(10, ratio)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda s: make_selector("magic", SHAPE),
            "selector is 'magic'; allowed are exact, hata, infinigen, quest, streaming",
        ),
        (lambda s: KVShape(1, 5, 2, 8, 1.0), "q_heads is 5; it must be a multiple of kv_heads, 2"),
        (lambda s: KVShape(0, 4, 2, 8, 1.0), "layers is 0; it must be at least 1"),
        (
            lambda s: HataSelector(SHAPE, options={"bits": 100}),
            "bits is 100; it must be a positive multiple",
        ),
        (lambda s: s.encode(3, keys_of(2), keys_of(2)), "layer is 3; allowed are 0 to 2"),
        (
            lambda s: s.encode(0, keys_of(2)[:, :1], None),
            "keys is [2, 1, 64]; it must be [T, 2, 64]",
        ),
        (lambda s: s.encode(0, keys_of(2), None), "anchor is None; it must be [A, 2, 64]"),
        (lambda s: s.score(0, query_of()[:1], torch.zeros(1)), "query is [1, 3, 64]"),
        (
            lambda s: s.score(0, query_of(), torch.zeros(4, 2, 4, dtype=torch.int32)),
            "metadata is [4, 2, 4]; it must be [N, 2, 5]",
        ),
        (
            lambda s: s.score(0, query_of(), torch.zeros(4, 2, 5)),
            "metadata is torch.float32; it must be torch.int32",
        ),
        (lambda s: top_k(torch.zeros(4), 1), "score is torch.float32 [4]"),
        (lambda s: top_k(torch.zeros(1, 4), 0), "k is 0; it must be at least 1"),
        (lambda s: budget(0, 0.5), "prompt_len is 0; it must be at least 1"),
    ],
)
def test_bad_input_is_named(call: Callable[[HataSelector], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        call(HataSelector(SHAPE))
