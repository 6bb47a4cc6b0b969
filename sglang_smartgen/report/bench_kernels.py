"""`smartgen bench kernels`: what the CPU paths of the index split and the row gather cost here.

The split stands beside a decode step of the small model on the same machine, in the same minutes:
one round is one step, then one split for each of its sparse layers, then the same in plain torch.
The gather stands beside a copy of as many bytes from the same pool, which is as cold for both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sglang_smartgen.config import ConfigError
from sglang_smartgen.output import result_stream
from sglang_smartgen.report.decode_step import DecodeStep

ROW_BYTES = (256, 512, 1024, 4096)
REMOTE_SHARE = 0.3  # of the selected entries: what a step finds before the fill has done much
SELECTED_SHARE = 0.1  # k over the prompt's length
POOL_BYTES = 128 << 20  # of K, and as much of V: several times the caches
TABLES = 4  # different inputs that take turns, so that none stays in a cache

Arms = dict[str, Callable[[int], object]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `smartgen bench kernels`."""
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")
    parser.add_argument("--batch", type=int, default=8, help="requests (%(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads (%(default)s)")
    parser.add_argument("--k", type=int, default=4096, help="entries a KV head (%(default)s)")
    parser.add_argument(
        "--cache-tokens",
        type=int,
        help="tokens the decode step attends to (k: what the step that splits attends to)",
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="two rounds")


def run(args: argparse.Namespace) -> int:
    """Measure and report; 0 always, a ratio is for the reader to judge.

    Raises ConfigError for a number below 1 and ModelCacheError when there is no model.
    """
    if args.cache_tokens is None:
        args.cache_tokens = args.k
    for field in ("batch", "kv_heads", "k", "cache_tokens", "rounds"):
        if getattr(args, field) < 1:
            name = field.replace("_", "-")
            raise ConfigError(f"--{name} is {getattr(args, field)}; it must be at least 1")
    console = Console(stderr=args.format == "json")
    with result_stream(args.format):
        report = _measure(args)
    if args.format == "json":
        print(json.dumps(report))
    else:
        _show(console, report)
    return 0


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    rounds = 2 if args.quick else args.rounds
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("decode step beside split", total=rounds + 1)
        step = DecodeStep(args.batch, args.cache_tokens)
        arms = {"step": lambda number: step()} | _split_arms(args, step.sparse_layers)
        split = _interleave(arms, rounds, lambda: progress.advance(task))
        gather: dict[int, dict[str, float]] = {}
        task = progress.add_task("gather beside memcpy", total=len(ROW_BYTES) * (4 * rounds + 1))
        for row_bytes in ROW_BYTES:
            arms = _gather_arms(args, row_bytes)
            gather[row_bytes] = _interleave(arms, 4 * rounds, lambda: progress.advance(task))
    return {
        "threads": torch.get_num_threads(),
        "batch": args.batch,
        "kv_heads": args.kv_heads,
        "k": args.k,
        "cache_tokens": args.cache_tokens,
        "sparse_layers": step.sparse_layers,
        "step_s": split["step"],
        "split_of_all_layers_s": split["split"],
        "torch_split_of_one_layer_s": split["torch"],
        "gather_s": {str(size): times["gather"] for size, times in gather.items()},
        "memcpy_s": {str(size): times["memcpy"] for size, times in gather.items()},
        "split_share_of_step": round(split["split"] / split["step"], 4),
        "gather_vs_memcpy": {
            str(size): round(times["memcpy"] / times["gather"], 3) for size, times in gather.items()
        },
    }


def _interleave(arms: Arms, rounds: int, advance: Callable[[], None]) -> dict[str, float]:
    """Median seconds of each arm; the arms take turns and the first round is a warm-up.

    Other programs on the machine slow all arms alike this way.
    """
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name, arm in arms.items():
            start = time.perf_counter()
            arm(number)
            times[name].append(time.perf_counter() - start)
        advance()
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def _split_arms(args: argparse.Namespace, layers: int) -> Arms:
    """The operator once for each sparse layer; five torch operators one by one, for one layer."""
    import torch

    from sglang_smartgen.core.mask import LOCAL, REMOTE
    from sglang_smartgen.core.split import split_index

    length = max(args.k, round(args.k / SELECTED_SHARE))
    shape = (args.batch, args.kv_heads)
    made = []
    for _ in range(TABLES):
        mask = torch.where(torch.rand(args.batch, length) < REMOTE_SHARE, REMOTE, LOCAL)
        index = torch.rand(*shape, length).topk(args.k).indices.sort().values
        made.append((index, mask.to(torch.int8)))

    def every_layer(number: int) -> None:
        for layer in range(layers):
            split_index(*made[(number + layer) % TABLES])

    return {"split": every_layer, "torch": lambda number: _torch_split(*made[number % TABLES])}


def _torch_split(index: Any, mask: Any) -> tuple[Any, ...]:
    """Algorithm 1 as a reader would write it: five operators, -1 padding included."""
    inside = (index >= 0) & (index < mask.shape[-1])
    shared = mask.unsqueeze(1).expand(-1, index.shape[1], -1)
    value = shared.gather(2, index.clamp(0, mask.shape[-1] - 1)) * inside
    lanes = []
    for kind in (2, 1):
        chosen = value == kind
        front = (~chosen).byte().argsort(stable=True)
        lanes += [index.where(chosen, -1).gather(2, front), chosen.sum(-1)]
    order = value.argsort(descending=True, stable=True)
    return index.where(value > 0, -1).gather(2, order), order, *lanes


def _gather_arms(args: argparse.Namespace, row_bytes: int) -> Arms:
    """K and V of a tenth of every request's entries, and a copy of as many bytes, same pool."""
    import torch

    from sglang_smartgen.triton_kernels import gather_rows

    heads, dim = args.kv_heads, row_bytes // 4
    tokens = max(10, POOL_BYTES // row_bytes // heads // args.batch)
    k = max(1, round(tokens * SELECTED_SHARE))
    pools = torch.randn(2, args.batch * tokens, heads, dim)
    first = torch.arange(args.batch)[:, None, None] * tokens
    slots = [
        torch.rand(args.batch, heads, tokens).topk(k).indices.sort().values + first
        for _ in range(TABLES)
    ]
    shape = (args.batch, heads, k, dim)
    out = torch.empty(shape), torch.empty(shape)
    rows = args.batch * heads * k
    flat = pools.view(2, -1, dim)

    def memcpy(number: int) -> None:
        # Another part of the pool each time, as the gather reads other rows each time.
        start = number * rows % (flat.shape[1] - rows)
        for pool, target in zip(flat, out, strict=True):
            target.view(-1, dim).copy_(pool[start : start + rows])

    return {
        "gather": lambda number: gather_rows(*pools, slots[number % TABLES], out),
        "memcpy": memcpy,
    }


def _show(console: Console, report: dict[str, Any]) -> None:
    table = Table(title=f"CPU paths, {report['threads']} thread(s)")
    for column in ("what", "SmartGen", "beside it", "ratio"):
        table.add_column(column, justify="left" if column == "what" else "right")
    split, step = report["split_of_all_layers_s"], report["step_s"]
    plain = report["torch_split_of_one_layer_s"] * report["sparse_layers"]
    what = f"split, {report['sparse_layers']} layers, {report['batch']} x {report['kv_heads']} x "
    what += f"{report['k']}"
    ms = "{:.1f} ms".format
    table.add_row(what, ms(split * 1e3), f"decode step {ms(step * 1e3)}", f"{split / step:.1%}")
    table.add_row("", ms(split * 1e3), f"torch {ms(plain * 1e3)}", f"{plain / split:.1f}x faster")
    for size, ratio in report["gather_vs_memcpy"].items():
        gather, memcpy = report["gather_s"][size], report["memcpy_s"][size]
        table.add_row(
            f"gather, rows of {size} bytes",
            ms(gather * 1e3),
            f"memcpy {ms(memcpy * 1e3)}",
            f"{ratio:.0%} of its speed",
        )
    console.print(table)
