"""Log-likelihood of a given answer under a mode: the servers decode it, token by token.

Scoring a text as part of the prompt would be prefill, which no mode changes. So a custom logit
processor of SGLang makes every step produce the next token of the reference (teacher forcing), and
the log probability that the model gave it comes back in what SGLang reports of that step: all
logits are replaced by two, TOP for the forced token and the wanted log probability for a mark,
whose distance survives the softmax. The first token is P's, dense in every mode, and not counted.

The servers need `--enable-custom-logit-processor` and this package. `ForcedAnswer` is sent by
reference, so that nothing is unpickled but its name.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PARAMETER = "forced_ids"
TOP = 1.0
NOTHING = -1e9


class ForcedAnswer:
    """SGLang's custom logit processor: `custom_params` has the ids to produce and the request."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]]) -> Tensor:
        """float [rows, vocabulary] in and out; a row past the end of its answer stays as it is."""
        for row, parameters in zip(logits, custom_param_list, strict=True):
            ids, step = parameters[PARAMETER], len(parameters["__req__"].output_ids)
            if step >= len(ids):
                continue
            forced = int(ids[step])
            wanted = torch.log_softmax(row.float(), dim=-1)[forced].item()
            row.fill_(NOTHING)
            row[forced] = TOP
            row[mark(forced)] = wanted
        return logits


def mark(forced: int) -> int:
    """The token that carries the log probability of `forced`."""
    return 1 if forced == 0 else 0


def serialized() -> str:
    """The field `custom_logit_processor` of a request."""
    return json.dumps({"callable": pickle.dumps(ForcedAnswer).hex()})


def logprobs(ids: Sequence[int], rows: Sequence[Sequence[tuple[int, float]]]) -> list[float]:
    """Log probability of every token of the reference `ids` but the first.

    rows: (token id, log probability) pairs of the two best tokens of each step. Raises ValueError
    when the servers did not produce `ids` by `ForcedAnswer`.
    """
    if len(rows) != len(ids):
        raise ValueError(f"{len(rows)} tokens came back for a reference of {len(ids)}")
    found = []
    for forced, row in zip(ids, rows, strict=True):
        step = dict(row)
        if set(step) != {forced, mark(forced)}:
            raise ValueError("the servers did not produce the tokens of the reference")
        found.append(TOP + step[mark(forced)] - step[forced])
    return found[1:]
