"""Requests whose right answers are known, asked of a running pair while something goes wrong.

Each prompt is answered alone first. An answer under load or trouble is then right (the same
tokens), near (different from where the model itself was undecided), wrong, or failed with a cause.
The caller's thread asks; every request has a thread of its own, which ends with it.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from sglang_smartgen.report.client import Answer, Client, RequestError
from sglang_smartgen.report.cluster import Cluster
from sglang_smartgen.report.prompts import text_prompt

NEAR_TIE = 1e-3  # a gap between the two best log probabilities that summation order may decide
TEXTS = ("held_out_emma.txt", "held_out_northanger.txt")
# A quarter of the blocks at the start, the rest by fetch and fill; P's checksums are compared.
ARM: dict[str, Any] = {"verify": True, "proactive_blocks": 7680}
SLOW_FILL: dict[str, Any] = {**ARM, "credit": "fixed", "speculative_ratio": 0.05}


@dataclass(frozen=True)
class Question:
    """A prompt and the answer it has when it is asked alone."""

    prompt: list[int]
    arm: dict[str, Any]
    tokens: list[int]
    gaps: list[float]  # between the two best candidates of each token


@dataclass
class Asked:
    """One request: when it was sent and ended (seconds of a monotonic clock), and how."""

    question: Question
    rid: str
    began: float
    ended: float = 0.0
    answer: Answer | None = None

    @property
    def verdict(self) -> str:
        """`right`, `near`, `wrong` or `failed`."""
        answer, question = self.answer, self.question
        if answer is None or answer.error is not None:
            return "failed"
        pairs = zip(answer.token_ids, question.tokens, question.gaps, strict=True)
        for mine, wanted, gap in pairs:
            if mine != wanted:
                return "near" if gap < NEAR_TIE else "wrong"
        return "right"


@dataclass
class Trial:
    """Asks questions of a pair and keeps what came back."""

    cluster: Cluster
    asked: list[Asked] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def ask(self, question: Question, on_end: Callable[[Asked], None] = lambda _: None) -> Asked:
        """Send a question and return at once; `on_end` is called on its thread."""
        asked = Asked(question, f"trial-{uuid.uuid4().hex[:12]}", time.monotonic())
        self.asked.append(asked)

        def run() -> None:
            try:
                asked.answer = _ask(self.cluster, question, rid=asked.rid)
            finally:
                asked.ended = time.monotonic()
                on_end(asked)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()
        return asked

    def load(
        self,
        questions: Sequence[Question],
        count: int,
        concurrency: int,
        timeout_s: float,
        chance: random.Random,
        before: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Ask `count` questions drawn by `chance`, so many at a time, and wait for all answers.

        before: called with the number of each that is about to be asked. Raises RequestError when
        one is out for longer than `timeout_s`.
        """
        places = threading.Semaphore(concurrency)
        for number in range(count):
            before(number)
            if not places.acquire(timeout=timeout_s):
                break  # `wait` says what is out
            self.ask(chance.choice(questions), on_end=lambda _: places.release())
        self.wait(timeout_s)

    def wait(self, timeout_s: float) -> None:
        """Wait for all answers. Raises RequestError when one is still out after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        out = sum(thread.is_alive() for thread in self._threads)
        if out:
            raise RequestError(f"{out} requests have no end {timeout_s:.0f} s after the trouble")

    def verdicts(self) -> dict[str, int]:
        """How many requests ended how."""
        return verdicts(self.asked)

    def causes(self) -> list[str]:
        """What the failed requests were told, each text once."""
        errors = (asked.answer.error or "" for asked in self.asked if asked.answer is not None)
        return sorted({error for error in errors if error})


def verdicts(asked: Sequence[Asked]) -> dict[str, int]:
    """How many of these requests ended how."""
    return dict(Counter(one.verdict for one in asked))


def questions(
    cluster: Cluster, tokenizer: Any, lengths: Sequence[int], tokens: int, arms: Sequence[Any]
) -> list[Question]:
    """One question a length, its answer of `tokens` tokens asked for alone; the arms take turns.

    Raises RequestError when one of them fails.
    """
    texts = [(files("sglang_smartgen.report") / "data" / name).read_text("utf-8") for name in TEXTS]
    found = []
    for number, length in enumerate(lengths):
        start = 350 * (number // len(texts))
        prompt = text_prompt(tokenizer, texts[number % len(texts)], length, start)
        question = Question(prompt, dict(arms[number % len(arms)]), [0] * tokens, [])
        answer = _ask(cluster, question, top_logprobs=2)
        if answer.error is not None:
            raise RequestError(f"a prompt of {length} tokens failed, asked alone: {answer.error}")
        gaps = [best[1] - second[1] for best, second in (row[:2] for row in answer.top_logprobs)]
        found.append(Question(prompt, question.arm, answer.token_ids, gaps))
    return found


def mixed_lengths(count: int, shortest: int, longest: int, seed: int) -> list[int]:
    """`count` prompt lengths, evenly mixed in random order; the same ones for the same seed."""
    chance = random.Random(seed)
    return [chance.randint(shortest, longest) for _ in range(count)]


def _ask(cluster: Cluster, question: Question, **named: Any) -> Answer:
    return Client(cluster.url, timeout_s=120).generate(
        question.prompt,
        max_new_tokens=len(question.tokens),
        ignore_eos=True,
        smartgen=question.arm,
        stream=False,
        **named,
    )
