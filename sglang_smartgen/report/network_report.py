"""Numbers of `smartgen bench network`: medians of each arm, comparisons, and the tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sglang_smartgen.report.network_cells import FULL, STOCK, Cell, cell_of

Arm = dict[str, Any]
COMPARED_TOKENS = 64
MEDIANS = ("prefill_s", "steps_until_local", "fetches", "fetch_wait_s", "descriptors")
KEYS = tuple(field for field in Cell.__struct_fields__ if field != "round")
PLACE = ("mbit", "prompt_tokens", "batch", "steps", "blocks_per_layer")


def arms(rows: Iterable[dict[str, Any]]) -> list[Arm]:
    """One entry an arm: a cell without its round, with medians over its requests.

    ttst_s: time to the second token. tbt_s: mean inter-token time after that. tbt_first10_s: of the
    first ten. tbt_by_step_s, token_s: inter-token time and arrival of each token. tbt_local_s: mean
    inter-token time once everything was on D. bytes: by kind. An arm of which every request failed
    has None for all of them; `failed` counts, `error` is the first cause.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        cell = cell_of(row)
        groups.setdefault(tuple(getattr(cell, key) for key in KEYS), []).append(row)
    return [
        _arm(dict(zip(KEYS, key, strict=True)), group)
        for key, group in sorted(groups.items(), key=lambda item: _place(item[0]))
    ]


def _place(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Unshaped first, then slower and slower; modes in the order of their first rows."""
    named = dict(zip(KEYS, key, strict=True))
    rate = float("inf") if named["mbit"] is None else named["mbit"]
    return (named["prompt_tokens"], named["batch"], -rate)


def _arm(about: Arm, rows: Sequence[dict[str, Any]]) -> Arm:
    whole = [row for row in rows if row["error"] is None]
    errors = [row["error"] for row in rows if row["error"] is not None]
    gaps = [row["tbt_s"] for row in whole]
    found: Arm = {
        **about,
        "ttft_s": _median(row["ttft_s"] for row in whole),
        "ttst_s": _median(row["ttst_s"] for row in whole),
        "tbt_s": _median(_mean(gap[1:]) for gap in gaps),
        "tbt_first10_s": _median(_mean(gap[:10]) for gap in gaps),
        "tbt_local_s": _median(map(_local_gap, whole)),
        "tbt_by_step_s": [_median(step) for step in zip(*gaps, strict=False)],
        "token_s": [_median(at) for at in zip(*(r["token_times_s"] for r in whole), strict=False)],
    }
    for key in MEDIANS:
        found[key] = _median(row.get(key) for row in whole)
    kinds = whole[0]["bytes"] if whole else {}
    found["bytes"] = {kind: int(_median(row["bytes"][kind] for row in whole)) for kind in kinds}
    found["bandwidth"] = _median(row.get("bandwidth") for row in whole)
    found |= {"requests": len(rows), "failed": len(errors), "error": (errors or [None])[0]}
    return found


def _local_gap(row: dict[str, Any]) -> float | None:
    """Mean inter-token time after the residual; of a whole transfer, after the second token."""
    until = row.get("steps_until_local")
    if until is None:
        return None
    return _mean(row["tbt_s"][max(1, until) :])


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: Iterable[Any]) -> Any:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


# Comparisons --------------------------------------------------------------------------------


def comparisons(found: Sequence[Arm]) -> list[Arm]:
    """SmartGen beside full, stock and the ideal, once for each of its arms.

    ttst_full: TTST of `full` in multiples of SmartGen's. ttst_ideal: SmartGen's in multiples of
    that of `full` on the network that is not shaped. tbt_stock, ttft_full, tbt_full: SmartGen's in
    multiples of theirs. tbt_local: its TBT without residual in multiples of that of `full`.
    token_worst: the largest arrival time of any of the first 64 tokens in multiples of `full`'s.
    """
    result: list[Arm] = []
    for ours in found:
        if ours["mode"] != "smartgen":
            continue
        same = [arm for arm in found if all(arm[key] == ours[key] for key in PLACE)]
        full = _first(same, lambda a, o=ours: a["mode"] == FULL and a["ratio"] == o["ratio"])
        stock = _first(same, lambda a: a["mode"] == STOCK)
        ideal = _first(
            found,
            lambda a, o=ours: (
                a["mode"] == FULL
                and a["mbit"] is None
                and a["ratio"] == o["ratio"]
                and all(a[key] == o[key] for key in PLACE if key != "mbit")
            ),
        )
        about = {key: ours[key] for key in KEYS if key != "mode"}
        result.append(
            {
                **about,
                "ttst_full": _quotient(full.get("ttst_s"), ours["ttst_s"]),
                "ttst_ideal": _quotient(ours["ttst_s"], ideal.get("ttst_s")),
                "ttft_full": _quotient(ours["ttft_s"], full.get("ttft_s")),
                "tbt_full": _quotient(ours["tbt_s"], full.get("tbt_s")),
                "tbt_stock": _quotient(ours["tbt_s"], stock.get("tbt_s")),
                "tbt_local": _quotient(ours["tbt_local_s"], full.get("tbt_s")),
                "token_worst": _worst(ours["token_s"], full.get("token_s", [])),
            }
        )
    return result


def _first(found: Sequence[Arm], wanted: Callable[[Arm], bool]) -> Arm:
    return next((arm for arm in found if wanted(arm)), {})


def _quotient(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _worst(ours: Sequence[float], full: Sequence[float]) -> float | None:
    pairs = list(zip(ours, full, strict=False))[:COMPARED_TOKENS]
    return max((one / other for one, other in pairs), default=None)


def link_ratios(found: Sequence[Arm], token_bytes: int) -> list[Arm]:
    """For each rate and length: seconds to send the whole KV, in prefills and in decode steps.

    A rate that is not shaped is what P has measured. prefill_s is the median that P has measured,
    step_s the TBT of `full` (of any mode where there is no `full`).
    """
    result: list[Arm] = []
    seen: set[tuple[Any, int]] = set()
    for arm in found:
        key = (arm["mbit"], arm["prompt_tokens"])
        if key in seen:
            continue
        seen.add(key)
        of_length = [a for a in found if a["prompt_tokens"] == arm["prompt_tokens"]]
        here = [a for a in of_length if a["mbit"] == arm["mbit"]]
        single = [a for a in of_length if a["batch"] == 1] or of_length
        full = [a for a in single if a["mode"] == FULL and a["tbt_s"]] or single
        rate = (
            _median(a["bandwidth"] for a in here) if arm["mbit"] is None else arm["mbit"] * 1e6 / 8
        )
        prefill_s = _median(a["prefill_s"] or None for a in single)
        step_s = _median(a["tbt_s"] for a in full)
        transfer_s = arm["prompt_tokens"] * token_bytes / rate if rate else None
        result.append(
            {
                "mbit": arm["mbit"],
                "prompt_tokens": arm["prompt_tokens"],
                "bytes_per_s": rate,
                "transfer_s": transfer_s,
                "prefill_s": prefill_s,
                "step_s": step_s,
                "transfer_per_prefill": _quotient(transfer_s, prefill_s),
                "transfer_per_step": _quotient(transfer_s, step_s),
            }
        )
    return result


# Tables -------------------------------------------------------------------------------------


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report of a run."""
    console.print(arms_table(report["arms"]))
    failed = [arm for arm in report["arms"] if arm["failed"]]
    for arm in failed:
        text = f"{rate_name(arm['mbit'])}, {arm['mode']}: {arm['failed']} of {arm['requests']} "
        console.print(
            text + f"failed: {arm['error']}", highlight=False, markup=False, soft_wrap=True
        )
    for link in report["links"]:
        console.print(_link_line(link), highlight=False, markup=False, soft_wrap=True)
    for one in report["compared"]:
        console.print(_compared_line(one), highlight=False, markup=False, soft_wrap=True)


def arms_table(found: Sequence[Arm]) -> Table:
    """One row an arm."""
    varied = [
        (key, label)
        for key, label in (
            ("prompt_tokens", "tokens"),
            ("batch", "batch"),
            ("ratio", "ratio"),
            ("speculative_ratio", "fill"),
        )
        if len({arm[key] for arm in found if arm[key] is not None}) > 1
    ]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("Mbit/s", no_wrap=True)
    table.add_column("mode", no_wrap=True)
    times = ("TTFT\ns", "TTST\ns", "TBT\ns", "TBT\nof 10", "local\nat")
    for name in (*(label for _, label in varied), *times, *(name for _, name in SENT)):
        table.add_column(name, justify="right", no_wrap=True)
    before: tuple[Any, ...] = ()
    for arm in found:
        place = (arm["prompt_tokens"], arm["batch"], arm["mbit"])
        sent = arm["bytes"]
        failed = arm["failed"] == arm["requests"]
        table.add_row(
            "" if place == before else str(arm["mbit"] or "none"),
            arm["mode"],
            *("-" if arm[key] is None else str(arm[key]) for key, _ in varied),
            "failed" if failed else _number(arm["ttft_s"], 2),
            _number(arm["ttst_s"], 2),
            *(_number(arm[key], 3) for key in ("tbt_s", "tbt_first10_s")),
            _number(arm["steps_until_local"], 0),
            *(_number(sent[kind] / 1e6, 1) if kind in sent else "-" for kind, _ in SENT),
        )
        before = place
    return table


SENT = (("proactive", "pushed\nMB"), ("on_demand", "fetch\nMB"), ("speculative", "fill\nMB"))
BYTE_KINDS = ("proactive", "metadata", "on_demand", "speculative")


def rate_name(mbit: int | None) -> str:
    """A rate in words."""
    return "unshaped" if mbit is None else f"{mbit} Mbit/s"


def _link_line(link: Arm) -> str:
    measured = " (as P measured it)" if link["mbit"] is None else ""
    return (
        f"{rate_name(link['mbit'])}{measured}, {link['prompt_tokens']} tokens: the whole KV takes "
        f"{_number(link['transfer_s'], 2)} s = {_number(link['transfer_per_prefill'], 2)} prefills "
        f"= {_number(link['transfer_per_step'], 1)} decode steps"
    )


def _compared_line(one: Arm) -> str:
    fill = one["speculative_ratio"]
    return (
        f"{rate_name(one['mbit'])}, {one['prompt_tokens']} tokens x {one['batch']}, ratio "
        f"{one['ratio']:g}, fill {fill}: TTST of full {_number(one['ttst_full'], 2)}x of "
        f"smartgen's; smartgen against unshaped full: TTST {_number(one['ttst_ideal'], 2)}x; "
        f"against full: TTFT {_number(one['ttft_full'], 2)}x, TBT {_number(one['tbt_full'], 2)}x, "
        f"TBT when local {_number(one['tbt_local'], 2)}x, latest token "
        f"{_number(one['token_worst'], 2)}x; against stock: TBT {_number(one['tbt_stock'], 2)}x"
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
