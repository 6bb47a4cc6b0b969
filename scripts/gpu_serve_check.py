#!/usr/bin/env python3
"""Check SmartGen's CUDA path on a GPU host: the device tests, then served pairs.

    scripts/run.sh python scripts/gpu_serve_check.py --model MODEL --out gpu-serve-check

Needs this repository's environment on a host with one NVIDIA GPU. First the tests of `engine/cuda`
run with their CUDA leg. Then pairs of servers answer the same prompts: with each device path and
each set of kernels, tokens must not depend on the mode (design.md 2.1), and how many of stock
SGLang's first tokens are met with every entry selected is reported. With a hierarchical cache on P
a prompt is asked again after it was evicted. Writes `gpu_serve_check.json`; the last output is a
table. Exit code 1 when a result is wrong, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("test_device_decode.py", "test_device_path.py", "test_device_kernels.py")
TOKENS = 48
WORDS = (
    "The mill by the river had stood for two hundred years before the railway came, and nobody who "
    "worked there could say who had built its first wheel. "
)
MODES = ("smartgen", "full")  # whose tokens are the same
TCP = {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp"}  # both servers are on this host
ARMS = (
    {"device_path": "cuda", "attention_kernels": "triton"},
    {"device_path": "cuda", "attention_kernels": "flashinfer"},
    {"device_path": "cuda_graph", "attention_kernels": "triton"},
)


def prompts() -> list[str]:
    """Texts of about 600 to 5,000 tokens."""
    return [f"Chapter {n}. " + WORDS * (20 * n) for n in (1, 2, 4, 8)]


@contextmanager
def pair(
    args: argparse.Namespace, name: str, config: dict[str, Any] | None, *flags: str
) -> Iterator[Any]:
    """A served pair in bfloat16; `flags` are for P."""
    from sglang_smartgen.report.cluster import Cluster

    both = ("--dtype", "bfloat16")
    with Cluster(
        args.model,
        config=config,
        log_dir=args.out / name,
        prefill_args=(*both, *flags),
        decode_args=both,
        max_total_tokens=args.max_total_tokens,
        start_timeout_s=args.start_timeout_s,
        env=TCP,
    ) as cluster:
        yield cluster


def ask(cluster: Any, text: str, **overrides: object) -> Any:
    """One greedy answer; `overrides` are SmartGen's for this request."""
    from sglang_smartgen.report.client import Client

    return Client(cluster.url).generate(text, max_new_tokens=TOKENS, smartgen=overrides or None)


def same_start(a: list[int], b: list[int]) -> int:
    """How many tokens two answers share before they differ."""
    shared = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        shared += 1
    return shared


def run_tests() -> dict[str, Any]:
    """The device tests with their CUDA leg."""
    files = [str(ROOT / "tests" / "unit" / name) for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-rs", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    return {"what": "device tests", "wrong": done.returncode != 0, "said": last}


def check_arm(args: argparse.Namespace, arm: dict[str, str], stock: list[list[int]]) -> Any:
    """Tokens of every mode, and beside stock's with every entry selected."""
    name = "-".join(arm.values())
    row: dict[str, Any] = {"what": name, "wrong": False, "said": ""}
    config = {"min_prompt_len": 64, "speculative_ratio": 0.05, **arm}
    began = time.monotonic()
    try:
        with pair(args, name, config) as cluster:
            for number, text in enumerate(prompts()):
                found = {mode: ask(cluster, text, mode=mode).token_ids for mode in MODES}
                if len({tuple(tokens) for tokens in found.values()}) != 1:
                    row["wrong"] = True
                    row["said"] += f"prompt {number}: modes differ; "
                everything = ask(cluster, text, ratio=1.0).token_ids
                row[f"stock_tokens_{number}"] = same_start(everything, stock[number])
            # It has no serial lanes on the CUDA path yet: refused, not served wrongly.
            refused = ask(cluster, prompts()[0], mode="partial")
            if not refused.error:
                row["wrong"] = True
                row["said"] += "mode partial was not refused; "
    except Exception as error:
        row["wrong"] = True
        row["said"] += f"{type(error).__name__}: {error}"
    row["seconds"] = time.monotonic() - began
    return row


def check_hierarchy(args: argparse.Namespace) -> dict[str, Any]:
    """A prefix that P's cache has moved to the host and brings back is pushed like any other."""
    row: dict[str, Any] = {"what": "hierarchical cache on P", "wrong": False, "said": ""}
    config = {"min_prompt_len": 64, **ARMS[0]}
    try:
        with pair(args, "hierarchy", config, "--enable-hierarchical-cache") as cluster:
            first = ask(cluster, prompts()[2])
            for filler in range(12):  # more than the pool holds
                ask(cluster, f"{filler} " + WORDS * 100)
            again = ask(cluster, prompts()[2])
            row["cached_tokens"] = again.cached_tokens
            row["wrong"] = first.token_ids != again.token_ids
            row["said"] = f"{again.cached_tokens} tokens cached"
    except Exception as error:
        row |= {"wrong": True, "said": f"{type(error).__name__}: {error}"}
    return row


def main() -> int:
    """Run everything; 1 when a result is wrong, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", required=True, help="folder or hub name of a small model")
    parser.add_argument("--out", type=Path, default=Path("gpu-serve-check"))
    parser.add_argument("--max-total-tokens", type=int, default=16_000)
    parser.add_argument("--start-timeout-s", type=float, default=600.0)
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    rows = [run_tests()]
    with pair(args, "stock", None) as cluster:
        stock = [ask(cluster, text).token_ids for text in prompts()]
    rows += [check_arm(args, arm, stock) for arm in ARMS]
    rows.append(check_hierarchy(args))
    report = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    (args.out / "gpu_serve_check.json").write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        print(f"  {row['what']:32} {'WRONG' if row['wrong'] else 'ok':6} {row['said']}")
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
