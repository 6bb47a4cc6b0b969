"""The 13 tasks of LongBench-E, which are also the English v1 tasks that SmartGen's paper runs.

What a task is asked with, how long its answer may be and how it is scored lies in
`report/data/longbench.json`. `NAME_e` is the LongBench-E version of a task: other items, evenly
spread over lengths, asked and scored alike.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import msgspec

from sglang_smartgen.config import ConfigError

LENGTH_RANGES = {"0-4k": (0, 4000), "4-8k": (4000, 8000), "8k+": (8000, 10**9)}
"""Words of the item, the columns of a LongBench-E score."""


class Task(msgspec.Struct, frozen=True):
    """One task.

    prompt: format string with {context} and {input}. chat: the prompt is framed by the model's chat
    template; few-shot and code tasks are not. first_line: only the first line of an answer counts.
    stop_at_newline: the answer ends with its first line, which has at least one token.
    """

    prompt: str
    max_new_tokens: int
    metric: str
    chat: bool = True
    first_line: bool = False
    stop_at_newline: bool = False


@cache
def tasks() -> dict[str, Task]:
    """All tasks by their plain name."""
    text = (files("sglang_smartgen.report") / "data" / "longbench.json").read_text("utf-8")
    return msgspec.convert(msgspec.json.decode(text)["tasks"], dict[str, Task])


def plain_name(name: str) -> str:
    """The name without LongBench-E's suffix."""
    return name.removesuffix("_e")


def task_of(name: str) -> Task:
    """The task called `name`, with or without `_e`. Raises ConfigError for any other name."""
    try:
        return tasks()[plain_name(name)]
    except KeyError:
        raise ConfigError(
            f"task is {name!r}; allowed are {', '.join(tasks())}, each also as NAME_e (LongBench-E)"
        ) from None


def length_range(words: int) -> str:
    """The column of LENGTH_RANGES for an item of `words` words."""
    return next(name for name, (low, high) in LENGTH_RANGES.items() if low <= words < high)
