"""`smartgen bench NAME`: the table of benchmarks, each two arms side by side on this machine.

A benchmark's module has `add_arguments(parser)` and `run(args) -> exit code`, like a command of
cli.py, and takes `--format terminal|json`. The modules of all benchmarks are imported for any of
them, so they import SGLang and transformers only inside `run`.
"""

from __future__ import annotations

import argparse
import importlib

from sglang_smartgen.cli import Command

BENCHMARKS = {
    "agreement": Command(
        "sglang_smartgen.report.bench_agreement",
        "next token with selection against full attention, teacher-forced through real servers",
    ),
    "cluster": Command(
        "sglang_smartgen.report.bench_cluster",
        "several prefill or decode servers under load, and one of them killed",
    ),
    "kernels": Command(
        "sglang_smartgen.report.bench_kernels",
        "index split and row gather beside a decode step, torch and memcpy",
    ),
    "faults": Command(
        "sglang_smartgen.report.bench_faults",
        "aborts, a stopped decode node, a restarted prefill node, a cut network: who gets what",
    ),
    "fill": Command(
        "sglang_smartgen.report.bench_fill",
        "speculative fill: time between tokens and use of the network, credit beside credit",
    ),
    "memory": Command(
        "sglang_smartgen.report.bench_memory",
        "peak memory of prefill and decode by mode, and load until saturation",
    ),
    "network": Command(
        "sglang_smartgen.report.bench_network",
        "every mode beside stock SGLang on a network of several rates",
    ),
    "orders": Command(
        "sglang_smartgen.report.bench_orders",
        "bytes fetched on demand by order of blocks, and time of each step by credit",
    ),
    "rails": Command(
        "sglang_smartgen.report.bench_rails",
        "two shaped rails that are equal, unequal, slowed and cut, and what a fetch waits",
    ),
    "select": Command(
        "sglang_smartgen.report.bench_select",
        "attention mass each selector captures, next-token agreement and cost",
    ),
    "soak": Command(
        "sglang_smartgen.report.bench_soak",
        "hundreds of requests at once: right answers, right bytes, flat memory",
    ),
    "serve": Command(
        "sglang_smartgen.report.bench_serve",
        "fetches against a prefill node that prefills, served by a thread and by a process",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-command a benchmark, with its own flags."""
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="NAME", required=True)
    for name, command in BENCHMARKS.items():
        subparser = benchmarks.add_parser(name, help=command.help, description=command.help)
        importlib.import_module(command.module).add_arguments(subparser)


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark and return its exit code."""
    return int(importlib.import_module(BENCHMARKS[args.benchmark].module).run(args))
