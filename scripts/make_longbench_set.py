"""Writes tests/data/longbench: four small tasks in LongBench's format, from invented texts.

    scripts/run.sh python scripts/make_longbench_set.py [FOLDER]

The texts are assembled from scripts/longbench_texts.json: chronicles of towns that never were, with
people, dates, sums and reasons. The seed is fixed, and only `random.random` is drawn from, so that
every Python writes the same bytes. An item's size is aimed at in characters, about 3.5 a token.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TARGET = HERE.parent / "tests" / "data" / "longbench"
SEED = 20261130
CHARACTERS_PER_TOKEN = 3.5
PASSAGES = 30  # the retrieval task's prompt says so
TEXTS: dict[str, Any] = json.loads((HERE / "longbench_texts.json").read_text("utf-8"))
PLAIN_SLOTS = ("reason", "material", "thing", "crop", "plant", "animal", "trade", "colour")


@dataclass(frozen=True)
class Event:
    """One invented fact: its paragraph, a line that sums it up, and a question with its answer."""

    text: str
    brief: str
    question: str
    answer: str


class Draw:
    """Draws from lists and templates; the same seed draws the same."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed).random  # a text seeds through SHA-512

    def below(self, count: int) -> int:
        """A whole number from 0 to `count` - 1."""
        return int(self._random() * count)

    def one(self, values: list[Any]) -> Any:
        """One of `values`."""
        return values[self.below(len(values))]

    def person(self) -> str:
        """First and last name."""
        return f"{self.one(TEXTS['first'])} {self.one(TEXTS['last'])}"

    def town(self) -> str:
        """The name of a town."""
        return str(self.one(TEXTS["town_start"]) + self.one(TEXTS["town_end"]))

    def slots(self) -> dict[str, str]:
        """A value for every slot that a template may have."""
        person, person2 = self.person(), self.person()
        while person2.split()[1] == person.split()[1]:
            person2 = self.person()
        year = str(1790 + self.below(150))
        return {
            "person": person,
            "person2": person2,
            "last": self.one(TEXTS["last"]),
            "town": self.town(),
            "year": year,
            "date": f"{1 + self.below(28)} {self.one(TEXTS['month'])} {year}",
            "small": str(3 + self.below(21)),
            "small2": str(2 + self.below(8)),
            "count": str(110 + self.below(880)),
            "money": str(100 * (11 + self.below(80))),
            **{name: self.one(TEXTS[name]) for name in PLAIN_SLOTS},
        }


class Chronicle:
    """Events of one document: no two of them have the same subject or main person."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._taken: set[str] = set()

    def event(self) -> Event:
        """The next event."""
        while True:
            kind, slots = self._draw.one(TEXTS["events"]), self._draw.slots()
            subject = kind["subject"].format(**slots)
            if not {subject, slots["person"]} & self._taken:
                break
        self._taken |= {subject, slots["person"]}
        slots |= {"subject": subject, "Subject": subject[0].upper() + subject[1:]}
        question, answer = self._draw.one(kind["qa"])
        text = _capital(self._draw.one(kind["texts"]).format(**slots))
        if self._draw.below(3):
            text += " " + self._draw.one(TEXTS["asides"]).format(**self._draw.slots())
        return Event(
            text,
            _capital(kind["brief"].format(**slots)),
            question.format(**slots),
            answer.format(**slots),
        )

    def events(self, characters: int) -> list[Event]:
        """At least one event, and so many that their texts have about `characters`."""
        events = [self.event()]
        while sum(len(event.text) + 2 for event in events) < characters:
            events.append(self.event())
        return events


def question_item(draw: Draw, characters: int) -> dict[str, Any]:
    """One document, and a question about one of its facts."""
    events = Chronicle(draw).events(characters)
    asked = draw.one(events)
    title = f"A short history of {draw.town()}"
    body = "\n\n".join(event.text for event in events)
    return _item(asked.question, f"{title}\n\n{body}", [asked.answer])


def class_item(draw: Draw, characters: int) -> dict[str, Any]:
    """Questions with the type of what they ask for, and one whose type is asked."""
    classes: dict[str, list[str]] = TEXTS["classes"]
    names = list(classes)

    def example() -> tuple[str, str]:
        name, slots = draw.one(names), draw.slots()
        slots["place"] = "the " + draw.one(TEXTS["place"]).format(**slots)
        return draw.one(classes[name]).format(**slots), name

    lines: list[str] = []
    while sum(len(line) + 1 for line in lines) < characters:
        lines.append("Question: {}\nType: {}".format(*example()))
    question, answer = example()
    asked = f"Question: {question}\nType:"
    return _item(asked, "\n".join(lines), [answer], names)


def retrieval_item(draw: Draw, characters: int) -> dict[str, Any]:
    """Numbered passages, and the summary of one of them."""
    chronicle = Chronicle(draw)
    passages = [chronicle.events(characters // PASSAGES - 130) for _ in range(PASSAGES)]
    wanted = draw.below(PASSAGES)
    context = "\n\n".join(
        f"Paragraph {number}: " + " ".join(event.text for event in events)
        for number, events in enumerate(passages, start=1)
    )
    abstract = " ".join(event.brief for event in passages[wanted])
    return _item(abstract, context, [f"Paragraph {wanted + 1}"])


def summary_item(draw: Draw, characters: int) -> dict[str, Any]:
    """A report in sections, and the lines that sum up each section's first finding."""
    chronicle, town = Chronicle(draw), draw.town()
    sections = [chronicle.events(characters // 5) for _ in range(5)]
    context = f"Report of the Office of Works of {town}\n\n" + "\n\n".join(
        f"Section {number}\n\n" + "\n\n".join(event.text for event in events)
        for number, events in enumerate(sections, start=1)
    )
    briefs = " ".join(events[0].brief for events in sections)
    answer = f"The report reviews works and events in and around {town}. {briefs}"
    return _item("", context, [answer])


TASKS: dict[str, tuple[Callable[[Draw, int], dict[str, Any]], int, int, int]] = {
    # task: how an item is made, number of items, tokens of the shortest and of the longest one
    "multifieldqa_en": (question_item, 22, 1000, 5500),
    "trec": (class_item, 14, 1000, 4000),
    "passage_retrieval_en": (retrieval_item, 14, 2300, 5500),
    "gov_report": (summary_item, 10, 1000, 4000),
}


def lines_of(task: str) -> list[str]:
    """The lines of one task's file, shortest item first."""
    make, count, shortest, longest = TASKS[task]
    lines = []
    for index in range(count):
        tokens = shortest * (longest / shortest) ** (index / (count - 1))
        item = make(Draw(f"{SEED} {task} {index}"), round(tokens * CHARACTERS_PER_TOKEN))
        item |= {"dataset": task, "_id": f"smartgen-{task}-{index:02d}"}
        lines.append(json.dumps(item) + "\n")
    return lines


def _item(
    question: str, context: str, answers: list[str], classes: list[str] | None = None
) -> dict[str, Any]:
    return {
        "input": question,
        "context": context,
        "answers": answers,
        "length": len(context.split()) + len(question.split()),  # words, as LongBench counts
        "dataset": "",
        "language": "en",
        "all_classes": classes,
        "_id": "",
    }


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def main() -> None:
    """Write one file a task."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    folder.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        (folder / f"{task}.jsonl").write_text("".join(lines_of(task)), "utf-8", newline="\n")


if __name__ == "__main__":
    main()
