"""A streaming client of SGLang's /generate that takes the time of every token.

Times are seconds since the request was sent. TTFT is the time of the first token (the decode server
emits it, after the transfer), TTST the time of the second, TBT the mean gap after that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Prompt = str | Sequence[int]
Event = tuple[float, dict[str, Any]]


class RequestError(RuntimeError):
    """A request failed that a command cannot do without; one sentence for the user."""


@dataclass
class Answer:
    """What came back for one request.

    token_times: arrival of every output token in seconds since the request was sent. error: why the
    answer is not whole, None when it is. top_logprobs: for every output token the (token id, log
    probability) pairs of the best candidates, only when asked for; then there are no token_times.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    error: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    rid: str | None = None
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return self.token_times[0] if self.token_times else None

    @property
    def ttst_s(self) -> float | None:
        """Time to the second token: TTFT and the first inter-token time."""
        return self.token_times[1] if len(self.token_times) > 1 else None

    @property
    def inter_token_s(self) -> list[float]:
        """Time between each token and the one before it; one less than there are tokens."""
        times = self.token_times
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def tbt_s(self) -> float | None:
        """Mean inter-token time from the second token on."""
        later = self.inter_token_s[1:]
        return sum(later) / len(later) if later else None


class Client:
    """Sends requests to the router of a pair (or to any SGLang server) at `url`."""

    def __init__(self, url: str, *, timeout_s: float = 300.0) -> None:
        """timeout_s: longest silence, in seconds, before a request counts as failed."""
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int,
        ignore_eos: bool = False,
        smartgen: Mapping[str, Any] | None = None,
        rid: str | None = None,
        top_logprobs: int = 0,
        stream: bool = True,
        on_text: Callable[[str], None] | None = None,
        hang_up_after: int | None = None,
    ) -> Answer:
        """Ask for a greedy continuation of a text or of token ids; failures are in `error`.

        smartgen: this request's `mode`, `ratio`, `proactive_blocks`. on_text gets every new piece
        of text. hang_up_after: close the connection after so many tokens. top_logprobs: number of
        candidates a token; such a request is not streamed, nor is one with `stream` False, and an
        answer that was not streamed has no token_times.
        """
        request = request_body(
            prompt,
            max_new_tokens=max_new_tokens,
            ignore_eos=ignore_eos,
            smartgen=smartgen,
            rid=rid,
            top_logprobs=top_logprobs,
            stream=stream,
        )
        answer = Answer(rid=rid)
        events = self._events(request)
        try:
            for event in events:
                before = len(answer.text)
                add_event(answer, event)
                if on_text is not None and len(answer.text) > before:
                    on_text(answer.text[before:])
                if hang_up_after is not None and len(answer.token_ids) >= hang_up_after:
                    answer.error = f"hung up after {len(answer.token_ids)} tokens"
                    break
            else:
                conclude(answer)
        finally:
            events.close()
        if not request["stream"]:
            answer.token_times = []
        return answer

    def _events(self, request: dict[str, Any]) -> Generator[Event, None, None]:
        """Answers as they come, each with its time; a broken connection is one with `error`."""
        import requests

        sent = time.monotonic()
        try:
            with requests.post(
                f"{self.url}/generate",
                json=request,
                stream=request["stream"],
                timeout=(5.0, self.timeout_s),
            ) as response:
                if response.status_code != 200:
                    cause = f"HTTP status {response.status_code}: {response.text.strip()}"
                    yield time.monotonic() - sent, {"error": {"message": cause}}
                elif request["stream"]:
                    for data in parse_stream(response.iter_lines()):
                        yield time.monotonic() - sent, data
                else:
                    yield time.monotonic() - sent, response.json()
        except requests.RequestException as error:
            yield time.monotonic() - sent, {"error": {"message": f"connection lost: {error}"}}


def request_body(
    prompt: Prompt,
    *,
    max_new_tokens: int,
    ignore_eos: bool,
    smartgen: Mapping[str, Any] | None,
    rid: str | None,
    top_logprobs: int = 0,
    stream: bool = True,
) -> dict[str, Any]:
    """The JSON of one greedy /generate request."""
    sampling: dict[str, Any] = {
        "temperature": 0,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": ignore_eos,
    }
    if smartgen is not None:
        sampling["custom_params"] = {"smartgen": dict(smartgen)}
    body: dict[str, Any] = {"sampling_params": sampling, "stream": stream and not top_logprobs}
    if isinstance(prompt, str):
        body["text"] = prompt
    else:
        body["input_ids"] = list(prompt)
    if rid is not None:
        body["rid"] = rid
    if top_logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": top_logprobs}
    return body


def parse_stream(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The objects of a server-sent event stream, up to its `[DONE]`."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        value = json.loads(data)
        if isinstance(value, dict):
            yield value


def add_event(answer: Answer, event: Event) -> None:
    """Take one answer of the server, cumulative or incremental, into `answer`.

    SGLang sends cumulative ones unless `--incremental-streaming-output` is set; then `output_ids`
    hold fewer ids than `meta_info.completion_tokens` counts. Tokens of one answer share its time.
    """
    seconds, data = event
    if "error" in data:
        error = data["error"]
        answer.error = str(error.get("message", error) if isinstance(error, dict) else error)
        return
    meta = data.get("meta_info", {})
    ids = data.get("output_ids") or []
    text = data.get("text") or ""
    total = meta.get("completion_tokens", len(ids))
    if len(ids) >= total:  # cumulative; an abort may repeat less than what came before
        answer.token_ids = max(answer.token_ids, ids, key=len)
        answer.text = max(answer.text, text, key=len)
    else:
        answer.token_ids = answer.token_ids + ids
        answer.text += text
    answer.token_times += [seconds] * (len(answer.token_ids) - len(answer.token_times))
    answer.prompt_tokens = meta.get("prompt_tokens", answer.prompt_tokens)
    answer.cached_tokens = meta.get("cached_tokens", answer.cached_tokens)
    answer.rid = meta.get("id", answer.rid)
    if candidates := meta.get("output_top_logprobs"):
        answer.top_logprobs = [
            [(token, logprob) for logprob, token, *_ in row] for row in candidates
        ]
    if reason := meta.get("finish_reason"):
        answer.finish_reason = reason["type"]
        if reason["type"] == "abort":
            answer.error = str(reason.get("message", "aborted"))


def conclude(answer: Answer) -> None:
    """The stream is over: an answer without a finish reason is not whole."""
    if answer.error is None and answer.finish_reason is None:
        answer.error = f"the stream broke off after {len(answer.token_ids)} tokens"
