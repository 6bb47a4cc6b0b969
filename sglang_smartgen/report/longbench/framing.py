"""From an item to the token ids that a server gets: prompt, middle truncation, chat frame.

As LongBench does it: a prompt that is too long loses its middle, before the chat template frames
it; few-shot and code tasks are not framed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_smartgen.config import ConfigError
from sglang_smartgen.report.longbench.data import Item
from sglang_smartgen.report.longbench.tasks import Task, task_of

REFERENCE_TOKENS = 64
"""So many tokens of a reference answer are scored at most: a summary's are hundreds."""


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt and of the first reference answer after it."""

    ids: list[int]
    truncated: bool
    reference: list[int]


class Framer:
    """Makes prompts for one model.

    positions: how many tokens the model can have in all. max_prompt_tokens, max_new_tokens: smaller
    limits of the user, or None.
    """

    def __init__(
        self,
        tokenizer: Any,
        facts: dict[str, Any],
        *,
        max_prompt_tokens: int | None = None,
        max_new_tokens: int | None = None,
    ) -> None:
        """facts: the model's config.json."""
        text = facts.get("text_config", facts)
        self._tokenizer = tokenizer
        self._positions = int(text.get("max_position_embeddings", 4096))
        self._max_prompt, self._max_new = max_prompt_tokens, max_new_tokens
        # Gemma answers garbage without BOS, and not every converted tokenizer adds it.
        self._bos_first = str(text.get("model_type", "")).startswith("gemma")

    def new_tokens(self, task: Task) -> int:
        """Longest answer to `task`."""
        return min(task.max_new_tokens, self._max_new or task.max_new_tokens)

    def room(self, task: Task) -> int:
        """Longest prompt of `task`: what the answer, or the reference, leaves of the positions.

        Raises ConfigError when that is nothing.
        """
        room = self._positions - max(self.new_tokens(task), REFERENCE_TOKENS)
        room = min(room, self._max_prompt or room)
        if room < 2:
            raise ConfigError(
                f"{self.new_tokens(task)} new tokens leave no room for a prompt in the "
                f"{self._positions} positions of the model"
            )
        return room

    def prompt(self, item: Item) -> Prompt:
        """The prompt of `item`. Raises ConfigError when not even the chat frame fits."""
        task = task_of(item.task)
        text = task.prompt.format(context=item.context, input=item.input)
        framed = task.chat and bool(getattr(self._tokenizer, "chat_template", None))
        room = self.room(task)
        ids, limit = self._ids(text, framed), room
        truncated = len(ids) > room
        while len(ids) > room:
            # The chat frame, and the new seam, cost tokens that only show afterwards.
            if limit < 2:
                raise ConfigError(f"a prompt of {room} tokens has no room for the chat template")
            ids = self._ids(truncate_middle(self._tokenizer, text, limit), framed)
            limit -= max(len(ids) - room, 1)
        answer = item.answers[0] if framed else _joined(text, item.answers[0])
        reference = self._tokenizer(answer, add_special_tokens=False)["input_ids"]
        return Prompt(ids, truncated, list(reference)[:REFERENCE_TOKENS])

    def _ids(self, text: str, framed: bool) -> list[int]:
        if framed:
            message = [{"role": "user", "content": text}]
            text = self._tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
        # A chat template writes its special tokens itself.
        ids = list(self._tokenizer(text, add_special_tokens=not framed)["input_ids"])
        bos = self._tokenizer.bos_token_id
        return [bos, *ids] if self._bos_first and ids[:1] != [bos] else ids


def truncate_middle(tokenizer: Any, text: str, limit: int) -> str:
    """`text`, or its first and last `limit // 2` tokens when it has more than `limit` (>= 2)."""
    ids = tokenizer(text)["input_ids"]
    if len(ids) <= limit:
        return text
    half = limit // 2
    first, last = (
        str(tokenizer.decode(part, skip_special_tokens=True)) for part in (ids[:half], ids[-half:])
    )
    return first + last


def _joined(text: str, answer: str) -> str:
    """`answer` as it would go on after `text`: with a space, unless a space or a line ends it."""
    return answer if text[-1:].isspace() else f" {answer}"
