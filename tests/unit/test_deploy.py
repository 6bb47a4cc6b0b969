"""Dashboard and alerts: every metric and label that they name exists, and all metrics are shown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_smartgen.core.counts import CAUSES, KINDS, STEPS
from sglang_smartgen.engine.metrics_feed import REASONS
from sglang_smartgen.engine.metrics_table import PREFIX, TABLE, Metric

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
# Of SGLang's scheduler metrics and of Prometheus itself.
OTHERS = {"instance", "job", "model_name", "engine_type", "tp_rank", "pp_rank", "dp_rank", "le"}
VALUES = {
    "kind": set(KINDS),
    "cause": {*CAUSES.values(), "other"},
    "reason": {*(reason.replace(" ", "_") for reason in REASONS), "other"},
    "step": {str(step) for step in STEPS},
    "mode": {"smartgen", "full", "partial", "proactive_only"},
    "engine_type": {"prefill", "decode"},
}
SELECTOR = re.compile(rf"({PREFIX}\w+)(?:\{{([^}}]*)\}})?")


def family(name: str) -> Metric:
    """The metric of the table that a name in an expression belongs to."""
    for metric in TABLE:
        if name == metric.name and metric.kind != "histogram":
            return metric
        if metric.kind == "histogram" and name in {
            f"{metric.name}_{part}" for part in ("bucket", "sum", "count")
        }:
            return metric
    pytest.fail(f"{name} is not in the table of metrics")


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def panels() -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            yield path, panel


def expressions() -> list[str]:
    found = [rule["expr"] for rule in alerts()]
    return found + [t["expr"] for _, panel in panels() for t in panel.get("targets", [])]


def test_there_are_some() -> None:
    assert DASHBOARDS and len(expressions()) > len(TABLE)


@pytest.mark.parametrize("expression", expressions())
def test_names_and_labels_exist(expression: str) -> None:
    for opening, closing in ("()", "{}", "[]"):
        assert expression.count(opening) == expression.count(closing)
    named = [(family(name), selector) for name, selector in SELECTOR.findall(expression)]
    assert named and expression.count("sglang:") == len(named)
    labels = {*OTHERS, *(label for metric, _ in named for label in metric.labels)}
    for metric, selector in named:
        for label, how, text in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', selector):
            assert label in {*OTHERS, *metric.labels}, f"{metric.name} has no label {label}"
            if not text.startswith("$"):
                parts = text.split("|") if how.endswith("~") else [text]
                assert set(parts) <= VALUES[label], f"{label} is never {text}"
    for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        assert {label.strip() for label in group.split(",")} <= labels, group


@pytest.mark.parametrize("expression", expressions())
def test_only_counters_have_a_rate(expression: str) -> None:
    for match in SELECTOR.finditer(expression):
        rated = re.search(r"\b(rate|increase)\($", expression[: match.start()])
        assert bool(rated) == (family(match[1]).kind != "gauge"), match[0]
        if rated:
            assert expression[match.end()] == "[", "a rate needs a range"


def test_every_metric_is_on_the_dashboard() -> None:
    text = " ".join(path.read_text() for path in DASHBOARDS)
    shown = {family(name).name for name, _ in SELECTOR.findall(text)}
    assert shown == {metric.name for metric in TABLE}


def test_every_metric_is_in_the_documentation() -> None:
    text = (DEPLOY.parent / "docs" / "metrics.md").read_text()
    for metric in TABLE:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        roles = ", ".join(metric.roles)
        row = f"| `{metric.name}` | {metric.kind} | {roles} | {labels} | {metric.help} |"
        assert row in text.splitlines(), metric.name


def test_alerts_are_complete() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names)) >= 5
    for rule in alerts():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            # What an aggregation leaves out would be shown as nothing.
            kept = re.findall(r"by \(([^)]*)\)", rule["expr"])
            assert not kept or any(label in group for group in kept), (rule["alert"], label)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_a_dashboard_is_one_that_grafana_takes(path: Path) -> None:
    board = json.loads(path.read_text())
    assert board["title"] and board["uid"] and board["schemaVersion"] >= 39
    variables = {variable["name"] for variable in board["templating"]["list"]}
    known = variables | {"__rate_interval", "__all"}
    assert set(re.findall(r"\$\{?(\w+)", path.read_text())) <= known
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"].endswith(".") and panel["targets"]
            letters = [target["refId"] for target in panel["targets"]]
            assert len(letters) == len(set(letters))
