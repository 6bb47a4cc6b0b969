"""Greedy answers held against stock SGLang's, with the one exception for near ties."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sglang_smartgen.report.client import Answer, Client
from sglang_smartgen.report.cluster import Cluster

TOKENS = 64
EVERYTHING = {"selector": "exact", "ratio": 1.0, "mode": "partial", "min_prompt_len": 64}
NEAR_TIE = 1e-3  # a gap between stock's two best logits that summation order may decide


def ask(url: str, prompt: Sequence[int], tokens: int = TOKENS, **named: Any) -> Answer:
    """One greedy answer of exactly `tokens` tokens; fails the test when it is not whole."""
    answer = Client(url).generate(
        prompt, max_new_tokens=tokens, ignore_eos=True, stream=False, **named
    )
    assert answer.error is None, answer.error
    assert len(answer.token_ids) == tokens
    return answer


def ask_together(
    url: str, prompts: Sequence[Sequence[int]], rids: Sequence[str] | None = None, **named: Any
) -> list[Answer]:
    """Answers of prompts that are sent at the same moment, with their rids where given."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [
            pool.submit(ask, url, prompt, rid=rid, **named)
            for prompt, rid in zip(prompts, rids or [None] * len(prompts), strict=True)
        ]
        return [answer.result() for answer in asked]


def assert_same_as_stock(
    url: str, prompt: Sequence[int], ours: Sequence[int], stock: Answer, **named: Any
) -> None:
    """Every token is stock's, or stock itself was undecided there.

    Where they differ, stock's own two best must be closer than NEAR_TIE; that is printed, and what
    follows is asked for again from stock's token on.
    """
    at = 0
    while at < len(stock.token_ids):
        theirs = stock.token_ids[at:]
        differ = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        first = next(differ, None)
        if first is None:
            return
        at += first
        (best, logprob), (second, runner_up) = stock.top_logprobs[at][:2]
        gap = logprob - runner_up
        assert gap < NEAR_TIE, (
            f"token {at} of a prompt of {len(prompt)} is {ours[first]}, stock's is {best} "
            f"(second {second}, gap {gap:.5f})"
        )
        print(f"near tie at token {at} of a prompt of {len(prompt)}: gap {gap:.6f}")
        at += 1
        rest = len(stock.token_ids) - at
        if rest:
            ours = ask(url, [*prompt, *stock.token_ids[:at]], rest, **named).token_ids


def finished(cluster: Cluster, rid: str) -> dict[str, Any]:
    """D's record of a request, which appears when its release began, just after its last token."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        for record in cluster.smartgen_state("decode")["finished"]:
            if record["rid"] == rid:
                return dict(record)
        time.sleep(0.1)
    raise AssertionError(f"no record of request {rid} on the decode node")
