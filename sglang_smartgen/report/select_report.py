"""The figures of `smartgen bench select`: rows, bars to meet, table, JSONL and PNG."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sglang_smartgen.report.captured_mass import RATIOS, Masses, mean_mass
from sglang_smartgen.report.machine import machine_facts
from sglang_smartgen.report.select_arms import ARMS, Arm
from sglang_smartgen.report.select_cost import Cost
from sglang_smartgen.report.select_plot import plot
from sglang_smartgen.select.base import Selector

MassTable = dict[str, dict[str, dict[str, float]]]


class Bar(NamedTuple):
    """One figure that must hold."""

    text: str
    value: float
    least: float

    @property
    def holds(self) -> bool:
        """Return whether the figure is reached; rounding errors do not decide."""
        return self.value >= self.least - 1e-9


def mass_bars(model: str, mass: Mapping[str, Mapping[str, float]]) -> list[Bar]:
    """Return what the captured mass at 10 % of one model must be. `mass` is by arm and ratio."""
    at = {arm: row["0.10"] for arm, row in mass.items()}
    bars = [
        Bar(f"{model}: infinigen", at["infinigen"], 0.88),
        Bar(f"{model}: infinigen, exact less 0.05", at["infinigen"], at["exact"] - 0.05),
        Bar(f"{model}: hata", at["hata"], 0.89),
        Bar(f"{model}: hata, above hata-orthogonal", at["hata"], at["hata-orthogonal"]),
        Bar(f"{model}: hata-orthogonal", at["hata-orthogonal"], 0.87),
    ]
    return bars + [
        Bar(f"{model}: {arm}, streaming plus 0.15", value, at["streaming"] + 0.15)
        for arm, value in at.items()
        if arm != "streaming"
    ]


def agreement_bars(agreement: Mapping[str, float]) -> list[Bar]:
    """Return what the agreement at 20 % must be; `streaming` is there for comparison only."""
    least = agreement["exact"] - 0.04
    return [Bar("agreement: exact", agreement["exact"], 0.95)] + [
        Bar(f"agreement: {arm}, exact less 0.04", value, least)
        for arm, value in agreement.items()
        if arm not in ("exact", "streaming")
    ]


class Report:
    """Collects the rows. A `quick` run judges no bar."""

    def __init__(self, quick: bool) -> None:
        self._quick = quick
        self._rows: list[dict[str, Any]] = [{"kind": "machine", **machine_facts()}]
        self._titles: dict[str, list[str]] = {}
        self._describe: dict[str, str] = {}
        self.mass: MassTable = {}
        self.agreement: dict[str, float] = {}
        self.cost: dict[str, dict[str, Cost]] = {}

    def start_model(
        self,
        model: str,
        tokens: int,
        layers: list[int],
        titles: list[str],
        queries: int,
        selectors: Mapping[Arm, Selector],
    ) -> None:
        """Record what is measured on `model`."""
        self._titles[model] = titles
        self._describe |= {arm.name: describe(arm, s) for arm, s in selectors.items()}
        self._rows.append(
            {
                "kind": "config",
                "model": model,
                "quick": self._quick,
                "tokens": tokens,
                "layers": layers,
                "texts": titles,
                "queries_a_text": queries,
                "selectors": {
                    arm.name: {
                        "describe": selector.describe(),
                        "fingerprint": selector.fingerprint(),
                        "lookahead": arm.lookahead,
                        "options": selector.options,
                    }
                    for arm, selector in selectors.items()
                },
            }
        )

    def add_mass(self, model: str, masses: Masses) -> None:
        """Record the captured mass of every arm, ratio, text and layer."""
        for (arm, ratio, text, layer), mass in masses.items():
            self._rows.append(
                {
                    "kind": "mass",
                    "model": model,
                    "selector": arm,
                    "ratio": ratio,
                    "text": self._titles[model][text],
                    "layer": layer,
                    "mass": mass,
                }
            )
        self.mass[model] = {
            arm.name: {f"{ratio:.2f}": mean_mass(masses, arm.name, ratio) for ratio in RATIOS}
            for arm in ARMS
        }

    def add_cost(self, model: str, costs: dict[str, Cost]) -> None:
        """Record metadata bytes and times of every arm."""
        self.cost[model] = costs
        for arm, cost in costs.items():
            row = msgspec.to_builtins(cost)
            self._rows.append({"kind": "cost", "model": model, "selector": arm, **row})

    def add_agreement(self, model: str, agreement: dict[str, list[float]], steps: int) -> None:
        """Record the share of steps that agree, one number a text."""
        for arm, values in agreement.items():
            for text, value in enumerate(values):
                self._rows.append(
                    {
                        "kind": "agreement",
                        "model": model,
                        "selector": arm,
                        "text": self._titles[model][text],
                        "steps": steps,
                        "agreement": value,
                    }
                )
            self.agreement[arm] = sum(values) / len(values)

    def bars(self) -> list[Bar]:
        """Return every bar with its measured value."""
        if self._quick:
            return []
        bars = [bar for model, mass in self.mass.items() for bar in mass_bars(model, mass)]
        return bars + (agreement_bars(self.agreement) if self.agreement else [])

    def result(self) -> dict[str, Any]:
        """Return the object that `--format json` prints; mass and agreement are its last keys."""
        return {
            "bars": [{**bar._asdict(), "holds": bar.holds} for bar in self.bars()],
            "cost": msgspec.to_builtins(self.cost),
            "mass": self.mass,
            "agreement": self.agreement,
        }

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write `select.jsonl` and `select.png` into `folder` and return their paths."""
        jsonl, png = folder / "select.jsonl", folder / "select.png"
        lines = [*self._rows, {"kind": "result", **self.result()}]
        jsonl.write_text("".join(json.dumps(row) + "\n" for row in lines))
        plot(self.mass, self.agreement, png)
        return jsonl, png

    def show(self, jsonl: Path, png: Path) -> None:
        """Print the tables, what missed its bar and where the files are, on stdout."""
        console = Console()
        for model in self.mass:
            console.print(self.table(model))
        for name, text in self._describe.items():
            if name != text:
                console.print(f"{name}: {text}", markup=False, highlight=False, soft_wrap=True)
        bars = self.bars()
        for bar in bars:
            if not bar.holds:
                console.print(
                    f"missed: {bar.text}: {bar.value:.3f}, at least {bar.least:.3f} is wanted",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )
        if bars:
            met = sum(bar.holds for bar in bars)
            console.print(f"{met} of {len(bars)} bars are met", highlight=False)
        console.print(f"written: {jsonl} and {png}", highlight=False, soft_wrap=True)

    def table(self, model: str) -> Table:
        """Return one model's table, in 80 columns."""
        step = next(iter(self.cost[model].values())).step_s
        title = f"{model}: attention mass captured; a step takes {step * 1e3:.0f} ms"
        table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("selector", no_wrap=True)
        for ratio in RATIOS:
            table.add_column(f"{ratio:.0%}", justify="right")
        table.add_column("next token\nagrees, 20%", justify="right")
        table.add_column("metadata\nB/token", justify="right")
        table.add_column("select\nms/step", justify="right")
        first = next(iter(self.mass)) == model
        for arm, mass in self.mass[model].items():
            cost = self.cost[model][arm]
            agrees = self.agreement.get(arm) if first else None
            table.add_row(
                arm,
                *(f"{value:.3f}" for value in mass.values()),
                "-" if agrees is None else f"{agrees:.1%}",
                f"{cost.metadata_bytes:,}",
                f"{cost.selection_s * 1e3:.1f}",
            )
        return table


def describe(arm: Arm, selector: Selector) -> str:
    """Return a selector's own description with the query it sees."""
    query = ", query of the layer before" if arm.lookahead else ", true query"
    return selector.describe() + query
