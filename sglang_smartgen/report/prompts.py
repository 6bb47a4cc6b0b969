"""Prompts of an exact number of tokens, cut from real text."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

QUESTION = "Who or what knocked on the door of the lighthouse, and what did Hester Quill do?"


def demo_text() -> str:
    """The story that the demo and the end-to-end tests read: about 9 KB of English prose."""
    return (files("sglang_smartgen.report") / "data" / "demo_text.txt").read_text("utf-8")


def load_tokenizer(model: Path | str) -> Any:
    """The tokenizer in the model folder `model`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def question_prompt(tokenizer: Any, text: str, question: str, tokens: int) -> list[int]:
    """Exactly `tokens` token ids: the beginning of `text`, then `question`, as one message.

    The chat template of the tokenizer frames the message where it has one. A text that is too short
    is read again from its beginning. Raises ValueError when `tokens` are too few for the question.
    """
    head, tail = _frame(tokenizer, f"\n\n{question}")
    body = _ids(tokenizer, text)
    room = tokens - len(head) - len(tail)
    if room < 1:
        least = tokens - room + 1
        raise ValueError(f"prompt tokens are {tokens}; the question alone needs {least}")
    body *= -(-room // len(body))
    return head + body[:room] + tail


def text_prompt(tokenizer: Any, text: str, tokens: int, start: int = 0) -> list[int]:
    """`tokens` ids of `text` from token `start` on. Raises ValueError when it is too short."""
    body = _ids(tokenizer, text)[start : start + tokens]
    if len(body) < tokens:
        raise ValueError(f"prompt tokens are {tokens}; the text has {len(body)} from token {start}")
    return body


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _frame(tokenizer: Any, after: str) -> tuple[list[int], list[int]]:
    """Token ids before and after the text of a message that ends with `after`."""
    mark = "TEXT-GOES-HERE"
    if getattr(tokenizer, "chat_template", None):
        message = {"role": "user", "content": mark + after}
        framed = str(
            tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        )
    else:
        framed = (tokenizer.bos_token or "") + mark + after + "\n"
    before, _, behind = framed.partition(mark)
    return _ids(tokenizer, before), _ids(tokenizer, behind)
