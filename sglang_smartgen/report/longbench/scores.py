"""From predictions to the table of arms by tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang_smartgen.report.longbench import metrics
from sglang_smartgen.report.longbench.arms import STOCK
from sglang_smartgen.report.longbench.data import Item
from sglang_smartgen.report.longbench.folder import Key
from sglang_smartgen.report.longbench.tasks import LENGTH_RANGES, length_range, task_of

Predictions = Mapping[Key, dict[str, Any]]
MEANS = ("score", "same_answer", "common_prefix", "loglik", "next_token")


def summary(
    predictions: Predictions, items: Mapping[str, Sequence[Item]], arms: Sequence[str]
) -> dict[str, Any]:
    """What `smartgen eval` reports: for every arm its tasks and their mean.

    `score` is LongBench's, 0 to 100. `relative` is the share of stock's score; `same_answer` the
    share of items whose answer has the same tokens as stock's; `common_prefix` the share of an
    answer before the first token that differs; null without stock. `loglik` is the mean over items
    of the mean log-likelihood of a decoded token of the reference, `next_token` the share of those
    tokens at which the arm prefers what stock prefers. The mean has each task once.
    """
    rows: dict[str, dict[str, Any]] = {}
    for arm in arms:
        tasks = {name: _task(predictions, name, of, arm) for name, of in items.items()}
        rows[arm] = {
            "tasks": tasks,
            "mean": {key: _mean(task[key] for task in tasks.values()) for key in MEANS},
        }
    for row in rows.values():
        base = rows.get(STOCK)
        row["mean"]["relative"] = _relative(row["mean"], base and base["mean"])
        for name, task in row["tasks"].items():
            task["relative"] = _relative(task, base and base["tasks"][name])
    return {"items": {name: len(of) for name, of in items.items()}, "arms": rows}


def _task(predictions: Predictions, name: str, items: Sequence[Item], arm: str) -> dict[str, Any]:
    task = task_of(name)
    ours = [predictions[name, item.line, arm] for item in items]
    scores = [
        metrics.score(task, prediction["pred"], item.answers, item.classes)
        for item, prediction in zip(items, ours, strict=True)
    ]
    stock = [predictions.get((name, item.line, STOCK)) for item in items]
    pairs = [(one, other) for one, other in zip(ours, stock, strict=True) if other is not None]
    answers = [(one["tokens"], other["tokens"]) for one, other in pairs]
    row: dict[str, Any] = {
        "score": 100 * sum(scores) / len(scores),
        "same_answer": _mean(float(a == b) for a, b in answers),
        "common_prefix": _mean(common_prefix(a, b) for a, b in answers),
        "loglik": _mean(_mean(prediction["reference_logprobs"] or ()) for prediction in ours),
        "next_token": _mean(_next_token(one, other) for one, other in pairs),
    }
    if name.endswith("_e"):
        row["by_length"] = {
            label: _mean(
                100 * score
                for item, score in zip(items, scores, strict=True)
                if length_range(item.length) == label
            )
            for label in LENGTH_RANGES
        }
    return row


def common_prefix(ours: Sequence[int], other: Sequence[int]) -> float:
    """Share of the longer answer's tokens before the first difference; 1 for two empty answers."""
    longest = max(len(ours), len(other))
    same = 0
    for a, b in zip(ours, other, strict=False):
        if a != b:
            break
        same += 1
    return same / longest if longest else 1.0


def _next_token(ours: dict[str, Any], other: dict[str, Any]) -> float | None:
    steps = zip(ours["reference_preferred"] or (), other["reference_preferred"] or (), strict=True)
    return _mean(float(a == b) for a, b in steps)


def _relative(row: dict[str, Any], base: dict[str, Any] | None) -> float | None:
    if base is None or not base["score"]:
        return None
    return float(row["score"] / base["score"])


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
