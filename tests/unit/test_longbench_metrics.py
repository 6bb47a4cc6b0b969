"""LongBench's metrics on cases whose values are known by hand."""

from __future__ import annotations

import importlib
import sys

import pytest

from sglang_smartgen.config import ConfigError
from sglang_smartgen.report.longbench import metrics
from sglang_smartgen.report.longbench.tasks import task_of


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("The Edith, MARLOW!", "an Edith Marlow", 1.0),  # case, punctuation, articles
        ("Edith Marlow was there", "Edith Marlow", 2 / 3),  # 2 of 4 and 2 of 2 words
        ("no no no", "no yes", 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)),  # a word counts once each
        ("Oskar", "Edith", 0.0),
        ("", "Edith", 0.0),
        ("the", "a", 0.0),  # nothing is left of either
    ],
)
def test_f1_of_words(prediction: str, answer: str, expected: float) -> None:
    assert metrics.qa_f1(prediction, answer) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("cold rain fell today", "cold rain fell today", 1.0),
        ("one two three four", "one three four five", 0.75),  # LCS 3 of 4 and of 4
        ("one two", "one two three four", 2 * 1 * 0.5 / 1.5),  # LCS 2 of 2 and of 4
        ("four three", "three four", 0.5),  # order counts
        ("", "one", 0.0),  # the library raises
        (" . ", "one", 0.0),
    ],
)
def test_rouge_l(prediction: str, answer: str, expected: float) -> None:
    assert metrics.rouge(prediction, answer) == pytest.approx(expected, abs=1e-6)


CLASSES = ["Animal", "Colour", "Number", "Number of things"]


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("Animal", "Animal", 1.0),
        ("It is Animal or Colour", "Animal", 0.5),
        ("It is Animal or Colour", "Number", 0.0),
        ("animal", "Animal", 0.0),
        ("", "Animal", 0.0),
        ("Number of things", "Number of things", 1.0),  # 'Number' is a part of it
        ("Number of things", "Number", 0.5),
    ],
)
def test_classification(prediction: str, answer: str, expected: float) -> None:
    assert metrics.classification(prediction, answer, CLASSES) == expected


def test_classification_skips_the_name_after_a_part_as_longbench_does() -> None:
    assert metrics.classification("Number", "Number", ["N", "Nu", "Number"]) == 0.5


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [("Paragraph 12", 1.0), ("12 or 13", 0.5), ("Paragraph 1", 0.0), ("112", 0.0), ("none", 0.0)],
)
def test_retrieval(prediction: str, expected: float) -> None:
    assert metrics.retrieval(prediction, "Paragraph 12") == expected


@pytest.mark.parametrize(("prediction", "expected"), [("7, 7 or 8", 2 / 3), ("07", 0.0), ("", 0)])
def test_count(prediction: str, expected: float) -> None:
    assert metrics.count(prediction, "7") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("\n# first\nreturn x\nreturn y", 1.0),
        ("```python\nreturn x\n```", 1.0),
        ("return y", 0.88),  # 7 of 8 characters: 87.5, rounded to even
        ("return x  # done", 0.0),
        ("", 0.0),
    ],
)
def test_code_similarity(prediction: str, expected: float) -> None:
    assert metrics.code_sim(prediction, "return x") == expected


def test_only_the_first_line_of_a_few_shot_answer_counts() -> None:
    answer = "\nAnimal\nQuestion: What?\nType: Colour"
    assert metrics.score(task_of("trec"), answer, ["Animal"], CLASSES) == 1.0
    assert metrics.score(task_of("multifieldqa_en"), "no\nAnn", ["Ann"], ()) > 0  # all lines count


def test_the_best_of_several_answers_counts() -> None:
    task = task_of("hotpotqa_e")
    assert metrics.score(task, "Ann", ["Bob", "Ann"], ()) == 1.0
    assert metrics.score(task, "Ann", ["Bob"], ()) == 0.0


def test_every_task_has_a_metric_and_a_prompt_that_can_be_filled() -> None:
    from sglang_smartgen.report.longbench.tasks import tasks

    assert len(tasks()) == 13
    for task in tasks().values():
        assert task.metric in metrics.METRICS
        assert "CONTEXT" in task.prompt.format(context="CONTEXT", input="INPUT")


@pytest.mark.parametrize(
    ("metric", "module", "package"),
    [("rouge", "rouge", "rouge"), ("code_sim", "fuzzywuzzy.fuzz", "fuzzywuzzy")],
)
def test_a_missing_library_is_one_sentence(
    metric: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError now
    with pytest.raises(ImportError):
        importlib.import_module(module)
    with pytest.raises(ConfigError, match=rf"package {package}, which is not installed: pip"):
        metrics.check_libraries({metric})
    metrics.check_libraries({"qa_f1"})


def test_an_unknown_task_is_named_with_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"task is 'trek'; allowed are qasper, .* repobench-p"):
        task_of("trek")
