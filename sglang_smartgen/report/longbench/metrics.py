"""LongBench's metrics, each 0 to 1, with the libraries it uses: `rouge` and `fuzzywuzzy`.

Definitions are those of its metrics.py, oddities included, since a score is only worth something
when it can be compared. The two libraries come with the extra `eval`.
"""

from __future__ import annotations

import importlib
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from sglang_smartgen.config import ConfigError
from sglang_smartgen.report.longbench.tasks import Task

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

Metric = Callable[[str, str, Sequence[str]], float]


def score(task: Task, prediction: str, answers: Sequence[str], classes: Sequence[str]) -> float:
    """The best score of `prediction` against any of `answers`, 0 to 1.

    Raises ConfigError when the library of the task's metric is not installed.
    """
    if task.first_line:
        prediction = prediction.lstrip("\n").split("\n")[0]
    metric = METRICS[task.metric]
    return max(0.0, *(metric(prediction, answer, classes) for answer in answers))


def check_libraries(metrics: set[str]) -> None:
    """Raise ConfigError now, rather than after the run, when a library of `metrics` is missing."""
    if "rouge" in metrics:
        _library("rouge")
    if "code_sim" in metrics:
        _library("fuzzywuzzy.fuzz")


def qa_f1(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F1 of the words that both have, without case, punctuation and articles."""
    ours, wanted = _words(prediction), _words(answer)
    common = sum((Counter(ours) & Counter(wanted)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(ours), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def rouge(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F of ROUGE-L; 0 where the library refuses a text, as it does for one without words."""
    scorer = _library("rouge").Rouge(metrics=["rouge-l"])
    try:
        return float(scorer.get_scores([prediction], [answer], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 / number of class names in the prediction when the right one is among them.

    A name that is part of the right one does not count. LongBench takes such names out of the list
    while it walks through it, so that the one after a name taken out is never looked at.
    """
    named = [name for name in classes if name in prediction]
    for name in named:
        if name in answer and name != answer:
            named.remove(name)
    return 1.0 / len(named) if answer in named else 0.0


def retrieval(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the prediction that are N; `answer` is `Paragraph N`."""
    found = _PARAGRAPH.search(answer)
    if found is None:
        raise ValueError(f"answer is {answer!r}; expected is 'Paragraph N'")
    return count(prediction, found[1])


def count(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the prediction that are `answer`."""
    numbers = _NUMBER.findall(prediction)
    return sum(number == answer for number in numbers) / len(numbers) if numbers else 0.0


def code_sim(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Similarity of the first line that is code: one without a backtick, `#` and `//`."""
    lines = prediction.lstrip("\n").split("\n")
    code = next((x for x in lines if not any(sign in x for sign in ("`", "#", "//"))), "")
    return float(_library("fuzzywuzzy.fuzz").ratio(code, answer) / 100)


METRICS: dict[str, Metric] = {
    "qa_f1": qa_f1,
    "rouge": rouge,
    "classification": classification,
    "retrieval": retrieval,
    "count": count,
    "code_sim": code_sim,
}


def _words(text: str) -> list[str]:
    return _ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _library(name: str) -> Any:
    package = name.partition(".")[0]
    try:
        with warnings.catch_warnings():
            # fuzzywuzzy says that it is slow without a Levenshtein package, which scores otherwise.
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"LongBench scores this task with the package {package}, which is not installed: "
            "pip install 'sglang-smartgen[eval]'"
        ) from None
