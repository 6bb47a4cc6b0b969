"""Teacher-forced decoding through real servers: what a model prefers at each token of a text.

The servers run with FORCED_ARGS. The first token of an answer comes from prefill, which is the same
in every mode, and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_smartgen.report.client import RequestError, request_body

FORCED_ARGS = ("--enable-custom-logit-processor",)


@dataclass(frozen=True)
class Forced:
    """One answer. preferred: the most likely token of each decode step; logprobs: of the forced."""

    preferred: list[int]
    logprobs: list[float]


def force(
    url: str,
    prompt: Sequence[int],
    answer: Sequence[int],
    spare: int,
    smartgen: Mapping[str, Any] | None = None,
    timeout_s: float = 1800.0,
) -> Forced:
    """Make the server at `url` answer `prompt` with `answer`: a step for each token but the first.

    spare: a token id that is not in `answer` and that the model never expects, as an unused special
    one. Raises RequestError when the request fails, ValueError for a spare that is in the answer.
    """
    import requests

    body = forced_body(prompt, answer, spare, smartgen)
    try:
        response = requests.post(f"{url}/generate", json=body, timeout=timeout_s)
    except requests.RequestException as error:
        raise RequestError(f"a teacher-forced request failed: {error}") from None
    if response.status_code != 200:
        raise RequestError(f"a teacher-forced request failed: {response.text.strip()}")
    return read_forced(response.json(), answer, spare)


def forced_body(
    prompt: Sequence[int],
    answer: Sequence[int],
    spare: int,
    smartgen: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The JSON of the /generate request of `force`. Raises ValueError like it."""
    from sglang_smartgen.engine.forced_tokens import ForcedTokens

    if spare in answer:
        raise ValueError(f"spare is {spare}; it must not be in the answer")
    body = request_body(
        prompt,
        max_new_tokens=len(answer),
        ignore_eos=True,
        smartgen=smartgen,
        rid=None,
        top_logprobs=2,
    )
    params = body["sampling_params"].setdefault("custom_params", {})
    params |= {"forced": list(answer), "spare": spare}
    body |= {"custom_logit_processor": ForcedTokens.to_str(), "token_ids_logprob": [spare]}
    return body


def read_forced(data: Mapping[str, Any], answer: Sequence[int], spare: int) -> Forced:
    """What a server's answer to `forced_body` says. Raises RequestError when it is not `answer`."""
    if data["output_ids"] != list(answer):
        raise RequestError(f"a teacher-forced request ended early: {data['meta_info']}")
    return read_answer(data["meta_info"], answer, spare)


def read_answer(meta: Mapping[str, Any], answer: Sequence[int], spare: int) -> Forced:
    """What the log probabilities in `meta_info` of a forced answer say of the model itself.

    With l the largest true logit and the forced token at l + ABOVE, the true probabilities are
    those of the rest, over 1 - e^ABOVE * p(l): the forced token's extra mass taken out again.
    """
    from sglang_smartgen.engine.forced_tokens import ABOVE

    preferred, logprobs = [], []
    rows = zip(answer, meta["output_top_logprobs"], meta["output_token_ids_logprobs"], strict=True)
    for target, best, asked in list(rows)[1:]:
        second = next(entry for entry in best if entry[1] != target)
        preferred.append(target if second[1] == spare else second[1])
        rest = 1 - math.exp(min(0.0, second[0]) + ABOVE)
        logprobs.append(min(0.0, asked[0][0] - math.log(max(rest, 1e-12))))
    return Forced(preferred, logprobs)


def spare_token(tokenizer: Any, texts: Iterable[Sequence[int]]) -> int:
    """A special token that is in none of `texts`, which are token ids."""
    used = {token for ids in texts for token in ids}
    return next(int(token) for token in reversed(tokenizer.all_special_ids) if token not in used)
