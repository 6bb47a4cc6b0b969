"""k = all equals stock SGLang token for token, however the prompt was batched, cut or cached."""

from __future__ import annotations

import pytest
from e2e_cpu.compare import EVERYTHING, ask, ask_together, assert_same_as_stock, finished

from sglang_smartgen.report.client import Answer, Client
from sglang_smartgen.report.cluster import Cluster

exact = pytest.mark.pair(config=EVERYTHING)
chunked = pytest.mark.pair(config=EVERYTHING, prefill_args=["--chunked-prefill-size", "256"])


@pytest.mark.pair(config=None)
def test_stock_answers(stock: list[Answer]) -> None:
    assert len({tuple(answer.token_ids) for answer in stock}) == len(stock)


@exact
def test_single(stock: list[Answer], cluster: Cluster, prompts: list[list[int]]) -> None:
    compare(cluster, prompts, stock)


@exact
def test_batch_of_four(stock: list[Answer], cluster: Cluster, prompts: list[list[int]]) -> None:
    cluster.flush_cache()
    both = list(zip(prompts, stock, strict=True))
    for group in (both[:4], both[4:]):
        answers = ask_together(cluster.url, [prompt for prompt, _ in group])
        for (prompt, reference), answer in zip(group, answers, strict=True):
            assert_same_as_stock(cluster.url, prompt, answer.token_ids, reference)


@exact
def test_prefix_hit(stock: list[Answer], cluster: Cluster, prompts: list[list[int]]) -> None:
    """The first half of the prompt is in P's radix cache."""
    prompt, reference = prompts[-1], stock[-1]
    cluster.flush_cache()
    half = len(prompt) // 2
    Client(cluster.url).generate(prompt[:half], max_new_tokens=1)
    answer = ask(cluster.url, prompt)
    assert half - 1 <= answer.cached_tokens < len(prompt) - 1
    assert_same_as_stock(cluster.url, prompt, answer.token_ids, reference)


@chunked
def test_chunked_prefill(stock: list[Answer], cluster: Cluster, prompts: list[list[int]]) -> None:
    """Four at a time, so that chunks of one prompt are computed beside those of another."""
    compare(cluster, prompts, stock, together=4)


def compare(
    cluster: Cluster, prompts: list[list[int]], stock: list[Answer], together: int = 1
) -> None:
    """So many prompts at a time; every room must have been SmartGen's, and partial."""
    cluster.flush_cache()
    for start in range(0, len(prompts), together):
        group = slice(start, start + together)
        rids = [f"equal-{number}" for number in range(len(prompts))[group]]
        answers = ask_together(cluster.url, prompts[group], rids)
        for prompt, reference, answer, rid in zip(
            prompts[group], stock[group], answers, rids, strict=True
        ):
            assert_same_as_stock(cluster.url, prompt, answer.token_ids, reference)
            record = finished(cluster, rid)
            assert record["fallback"] == "" and record["local_share_at_start"] < 0.1
