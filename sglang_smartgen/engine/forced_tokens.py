"""A logit processor that makes a server write a given text, and shows what it would have written.

SGLang's `custom_logit_processor` (flag `--enable-custom-logit-processor`). In every step the forced
token gets the largest logit; a spare token, which nobody expects, gets the one that the forced
token had. The two best log probabilities and the spare's then say what the model preferred and how
likely the forced token was (`report/forced.py`).
"""

from __future__ import annotations

from typing import Any

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor

ABOVE = 1.0  # of the forced token's logit over the largest; small, or the others lose all precision


class ForcedTokens(CustomLogitProcessor):  # type: ignore[misc]
    """Reads `forced` (token ids of the whole answer) and `spare` (a token id) of custom_params."""

    def __call__(
        self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> Tensor:
        """logits: float [n, vocab] of n requests, changed in place and returned."""
        for row, params in zip(logits, custom_param_list or [], strict=True):
            step, forced = len(params["__req__"].output_ids), params["forced"]
            if step < len(forced):
                row[params["spare"]] = -float("inf")
                best, wanted = row.max(), row[forced[step]].clone()
                row[params["spare"]] = wanted
                row[forced[step]] = best + ABOVE
        return logits
