"""The requests of one item and arm: the answer, and the log-likelihood of the reference.

Prompts are prefilled once: a first request leaves a prompt in P's radix cache, and what follows
finds it there, whichever arm it belongs to and wherever a run was taken up again. So all arms of a
pair decode on the same bits. Cache keys of our own (`extra_key`) keep that prompt apart from all
others, whose beginning may be the same, and give a cold request a prefill of its own.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import requests

from sglang_smartgen.report.client import (
    Answer,
    RequestError,
    add_event,
    conclude,
    request_body,
)
from sglang_smartgen.report.forced import Forced, forced_body, read_forced
from sglang_smartgen.report.longbench.arms import Arm
from sglang_smartgen.report.longbench.data import Item
from sglang_smartgen.report.longbench.framing import Prompt
from sglang_smartgen.report.longbench.tasks import Task, task_of

TRIES = 3
WARM_UP_TOKENS = 2  # the second is the decode server's


@dataclass(frozen=True)
class Job:
    """One item with its prompt."""

    item: Item
    prompt: Prompt
    max_new_tokens: int


class Asker:
    """Asks the servers behind one URL.

    newline: the token that ends a one-line answer. spare: a token that is in no reference, to score
    them (see `report/forced.py`); None = they are not scored.
    cold: whether every request prefills anew. check: raises when the servers have ended.
    """

    def __init__(
        self,
        url: str,
        *,
        newline: int,
        spare: int | None,
        cold: bool = False,
        timeout_s: float = 600.0,
        pause_s: float = 2.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._url = url.rstrip("/")
        self._newline = newline
        self._spare, self._cold = spare, cold
        self._timeout_s, self._pause_s = timeout_s, pause_s
        self._check = check
        self._run = uuid.uuid4().hex

    def warm_up(self, job: Job, arms: list[Arm]) -> None:
        """Leave the prompt in P's cache if any of `arms` will look for it."""
        for arm in arms:
            if not (self._cold or arm.cold):
                body = _body(job.prompt.ids, arm, WARM_UP_TOKENS, ignore_eos=True)
                self._post(body | self._cache_key(job, arm), f"{_name(job)}, the first prefill,")
                return

    def predict(self, job: Job, arm: Arm) -> dict[str, Any]:
        """One line of predictions.jsonl. Raises RequestError when the servers do not answer."""
        item = job.item
        answer = Answer()
        add_event(answer, (0.0, self._answer(job, arm)))
        forced = self._forced(job, arm)
        return {
            "task": item.task,
            "line": item.line,
            "_id": item.id,
            "arm": arm.name,
            "pred": answer.text,
            "answers": list(item.answers),
            "all_classes": list(item.classes) or None,
            "length": item.length,
            "tokens": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "prompt_tokens": len(job.prompt.ids),
            "truncated": job.prompt.truncated,
            "reference_logprobs": forced and forced.logprobs,
            "reference_preferred": forced and forced.preferred,
        }

    def _answer(self, job: Job, arm: Arm) -> dict[str, Any]:
        task = task_of(job.item.task)
        body = _body(job.prompt.ids, arm, job.max_new_tokens, **self._stops(task))
        return self._post(body | self._cache_key(job, arm), f"{_name(job)} in arm {arm.name}")

    def _forced(self, job: Job, arm: Arm) -> Forced | None:
        """What the decode steps say of the reference: nothing of one that has a single token."""
        ids = job.prompt.reference
        if self._spare is None:
            return None
        if len(ids) < 2:
            return Forced([], [])
        body = forced_body(job.prompt.ids, ids, self._spare, _overrides(arm))
        what = f"{_name(job)} in arm {arm.name}, scoring the reference,"
        return read_forced(self._post(body | self._cache_key(job, arm), what), ids, self._spare)

    def _stops(self, task: Task) -> dict[str, Any]:
        if not task.stop_at_newline:
            return {}
        return {"stop_token_ids": [self._newline], "min_new_tokens": 1}

    def _cache_key(self, job: Job, arm: Arm) -> dict[str, str]:
        shared = f"{self._run}-{job.item.task}-{job.item.line}"
        return {"extra_key": uuid.uuid4().hex if self._cold or arm.cold else shared}

    def _post(self, body: dict[str, Any], what: str) -> dict[str, Any]:
        """The server's whole answer to `body`; what fails is sent again, TRIES times in all."""
        for attempt in range(1, TRIES + 1):
            answer = Answer()
            try:
                response = requests.post(
                    f"{self._url}/generate", json=body, timeout=(5.0, self._timeout_s)
                )
                if response.status_code != 200:
                    answer.error = f"HTTP status {response.status_code}: {response.text.strip()}"
                else:
                    data: dict[str, Any] = response.json()
                    add_event(answer, (0.0, data))
                    conclude(answer)
            except (requests.RequestException, ValueError) as error:
                answer.error = f"connection lost: {error}"
            if answer.error is None:
                return data
            self._check()
            if attempt < TRIES:
                time.sleep(self._pause_s * attempt)
        raise RequestError(
            f"{what} failed {TRIES} times, at last with: {answer.error}; "
            "the same command goes on from here"
        )


def _body(
    ids: list[int], arm: Arm, max_new_tokens: int, *, ignore_eos: bool = False, **sampling: Any
) -> dict[str, Any]:
    body = request_body(
        ids,
        max_new_tokens=max_new_tokens,
        ignore_eos=ignore_eos,
        smartgen=_overrides(arm),
        rid=None,
        stream=False,
    )
    body["sampling_params"] |= sampling
    return body


def _overrides(arm: Arm) -> dict[str, Any] | None:
    return None if arm.pair is None else arm.overrides


def _name(job: Job) -> str:
    return f"{job.item.task} line {job.item.line}"
