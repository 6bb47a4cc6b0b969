"""Quest and streaming against naive references, and what every selector costs."""

from __future__ import annotations

import pytest
import select_cases as cases
import torch

from sglang_smartgen.select import KVShape, make_selector
from sglang_smartgen.select.quest import PAGE, QuestSelector


@pytest.mark.parametrize("tokens", [1, 16, 40])
def test_quest_scores_a_page_by_the_bound_of_its_keys(tokens: int) -> None:
    selector = cases.selector_of("quest")
    keys, query = cases.keys_of(tokens, 2), cases.queries_of(1, 2).view(4, 2, 32)
    score = selector.score(2, query, cases.encode(selector, 2, keys))
    assert score.shape == (4, tokens)
    for head in range(4):
        total = torch.zeros(-(-tokens // PAGE))
        for q in query[head]:
            bounds = []
            for start in range(0, tokens, PAGE):
                page = keys[start : start + PAGE, head]
                low, high = page.amin(0), page.amax(0)
                bound = torch.maximum(q * low, q * high).sum()
                assert bound >= (page @ q).max() - 1e-4
                bounds.append(bound * 32**-0.5)
            total += torch.softmax(torch.stack(bounds), 0)
        wanted = total.repeat_interleave(PAGE)[:tokens]
        torch.testing.assert_close(score[head], wanted, rtol=1e-4, atol=1e-6)


def test_quest_takes_whole_pages() -> None:
    selector = cases.selector_of("quest")
    keys, query = cases.keys_of(160, 2), cases.queries_of(1, 2).view(4, 2, 32)
    index = selector.pick(selector.score(2, query, cases.encode(selector, 2, keys)), 3 * PAGE)
    for row in index:
        assert sorted(set((row // PAGE).tolist())) == (row[::PAGE] // PAGE).tolist()


def test_streaming_takes_sinks_and_the_latest() -> None:
    selector = make_selector("streaming", cases.WHOLE, options={"sinks": 3})
    metadata = cases.encode(selector, 2, cases.keys_of(20, 0))
    assert metadata.shape == (20, 4, 0)
    score = selector.score(2, torch.zeros(4, 2, 32), metadata)
    assert selector.pick(score, 6).tolist() == [[0, 1, 2, 17, 18, 19]] * 4
    assert selector.pick(score, 2).tolist() == [[0, 1]] * 4
    assert selector.pick(score, 20).tolist() == [list(range(20))] * 4
    with pytest.raises(ValueError, match="sinks is -1; it must be at least 0"):
        make_selector("streaming", cases.WHOLE, options={"sinks": -1})
    with pytest.raises(ValueError, match="no option 'window'; allowed are sinks"):
        make_selector("streaming", cases.WHOLE, options={"window": 3})


def test_metadata_bytes_of_a_token_are_those_of_the_reference_table() -> None:
    # Qwen3-14B in bfloat16: 40 layers, 8 KV heads, head_dim 128.
    shape = KVShape(layers=40, q_heads=40, kv_heads=8, head_dim=128, scaling=128**-0.5)
    artifact = cases.artifact_for("infinigen", shape, {}, {"width": 0.25})
    made = {
        name: make_selector(
            name, shape, torch.bfloat16, artifact=artifact if name == "infinigen" else None
        )
        for name in ("exact", "quest", "streaming", "infinigen")
    }
    found = {name: selector.metadata_bytes(shape) for name, selector in made.items()}
    assert found == {"exact": 77824, "quest": 77824, "streaming": 0, "infinigen": 19456}
    assert made["infinigen"].metadata_bytes(shape, sparse_layers=8) == 8 * 8 * 64
    quest = made["quest"]
    assert isinstance(quest, QuestSelector) and quest.stored_bytes(shape) == 38 * 8 * 32
    small = KVShape(layers=4, q_heads=2, kv_heads=1, head_dim=32, scaling=1.0)
    assert make_selector("hata", small).metadata_bytes(shape) == 38 * 8 * (128 // 8 + 4)
