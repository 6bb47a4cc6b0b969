#!/usr/bin/env python3
"""Check and time every operator of `triton_kernels` on a GPU, in less than 8 minutes.

Needs this repository's files, torch and triton; nothing is installed and no SGLang is imported.
Three parts: correctness on the device; time against plain torch and against the byte floor of the
card, measured in the same run; `sparse_decode` against dense attention. The last output is a short
table; `gpu_check.json` and, with matplotlib, `gpu_check.png` go to --out. Exit code 1 when a result
is wrong. `--dry-run-cpu` runs the same code at tiny sizes in Triton's interpreter: its times say
nothing and are not printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]


def load_package() -> Any:
    """Return `triton_kernels` under its import name, loaded from its folder, and no more of it.

    Its CPU paths import numpy, which torch and triton can do without; they are not run here
    except in a dry run.
    """
    if importlib.util.find_spec("numpy") is None:
        for name in ("numpy", "numpy.typing"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["numpy.typing"].NDArray = None  # type: ignore[attr-defined]
    parent = types.ModuleType("sglang_smartgen")
    parent.__path__ = []
    sys.modules["sglang_smartgen"] = parent
    name, folder = "sglang_smartgen.triton_kernels", ROOT / "triton_kernels"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.insert(0, str(ROOT / "tests"))  # the references
    return module


class Check:
    """One run: the device, the sizes and what has been found so far."""

    def __init__(self, dry: bool, seed: str) -> None:
        import torch

        self.torch, self.dry, self.seed = torch, dry, seed
        self.device = torch.device("cpu" if dry else "cuda")
        self.ops = load_package()
        self.rows: list[Row] = []
        self.attention: list[Row] = []
        self.correct: list[Row] = []
        self.floors: dict[str, float] = {}
        # Larger than any L2: written before each timed call, so that it starts cold.
        self._flush = torch.empty(1 << (10 if dry else 28), dtype=torch.int8, device=self.device)

    def randn(self, *shape: int, dtype: Any = None) -> Any:
        """Standard normal on the device, bfloat16 unless told otherwise."""
        dtype = dtype or self.torch.bfloat16
        return self.torch.randn(shape, dtype=dtype, device=self.device)

    def seconds(self, call: Callable[[], object], repeats: int = 20) -> float:
        """Median time of a call on the device; the caches are cold, the kernels compiled."""
        cuda = self.torch.cuda
        found = []
        for number in range(1 if self.dry else repeats + 3):
            self._flush.zero_()
            if self.dry:
                start = time.perf_counter()
                call()
                found.append(time.perf_counter() - start)
                continue
            begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            if number >= 3:
                found.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(found)

    def compare(
        self,
        name: str,
        ours: Callable[[], object],
        torch_version: Callable[[], object],
        floor: float | None = None,
        others: dict[str, Callable[[], object]] | None = None,
    ) -> None:
        """Time ours beside the torch version; `floor` is the least a call can take, in seconds."""
        row: Row = {"what": name, "ours_s": self.seconds(ours)}
        row["torch_s"] = self.seconds(torch_version, 10)
        row["speedup"] = row["torch_s"] / row["ours_s"]
        row["floor_s"] = floor
        row["share_of_floor"] = None if floor is None else floor / row["ours_s"]
        for other, call in (others or {}).items():
            try:
                row[other] = self.seconds(call)
            except Exception as error:
                row[other] = f"{type(error).__name__}: {error}"
        self.rows.append(row)
        say(f"timed {name}")


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


# --- part 1: correctness ----------------------------------------------------------------------


def check_correctness(check: Check, seconds: float) -> None:
    """Random cases of every operator against the references, until its share of time is used.

    New sizes mean new compilations, so the number of cases depends on the machine.
    """
    from reference import cases
    from reference.legs import DirectLeg

    leg = DirectLeg(str(check.device))
    share = seconds / len(cases.OPERATORS)
    for name, operator in cases.OPERATORS.items():
        start, number, wrong = time.monotonic(), 0, []
        while number < 3 or (time.monotonic() - start < share and number < 500):
            scale = 1 if number % 4 or check.dry else operator.large
            seed = f"{check.seed}-{number}"
            case = operator.make(cases.Source(seed, scale))
            try:
                said = cases.compare(operator, case, leg.run(name, *case.args, **case.options))
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            if said is not None:
                wrong.append(f"case {seed} scale {scale}: {said}")
            number += 1
        graph = check_graph(check, name, operator, cases) if not check.dry else "not run"
        check.correct.append({"operator": name, "cases": number, "wrong": wrong, "graph": graph})
        say(f"{name}: {number} cases, {len(wrong)} wrong, CUDA graph {graph}")


def check_graph(check: Check, name: str, operator: Any, cases: Any) -> str:
    """Capture one call, replay it on new input of the same shape; no synchronisation allowed."""
    from reference.legs import on

    torch = check.torch
    call = getattr(check.ops, name)
    first, second = (operator.make(cases.Source(f"graph-{n}", 3)) for n in (0, 0))
    args, options = on("cuda", first.args), on_values(on, first.options)
    try:
        torch.cuda.set_sync_debug_mode("error")
        call(*args, **options)  # compiles, and must not wait for the device
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call(*args, **options)
        for old in args:
            if isinstance(old, torch.Tensor) and old.is_floating_point():
                old.mul_(0.5)  # the replay must read the tensors, not remember them
        graph.replay()
        torch.cuda.synchronize()
        halved = tuple(
            a * 0.5 if isinstance(a, torch.Tensor) and a.is_floating_point() else a
            for a in second.args
        )
        found = tuple(result) if isinstance(result, tuple) else (result,)
        said = cases.compare(operator, cases.Case(halved, second.options), on("cpu", found))
        return said or "ok"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_values(on: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Options with their tensors on the GPU."""
    return {key: on("cuda", value) for key, value in options.items()}


# --- part 2: time against torch and against the card's floor ----------------------------------


def measure_floors(check: Check) -> None:
    """Bytes a second of a device copy (read plus write) and of a copy from pinned memory."""
    torch, size = check.torch, 1 << (12 if check.dry else 29)
    source = torch.zeros(size, dtype=torch.int8, device=check.device)
    target = torch.empty_like(source)
    host = torch.zeros(size, dtype=torch.int8)
    if not check.dry:
        host = host.pin_memory()
    check.floors["device_bytes_s"] = 2 * size / check.seconds(lambda: target.copy_(source))
    check.floors["host_to_device_bytes_s"] = size / check.seconds(
        lambda: target.copy_(host, non_blocking=True)
    )
    say("measured the bandwidth of the card")


def time_operators(check: Check) -> None:
    """Each operator at the size of a real decode step; the fused split at B=32, Hkv=8, k=2,048."""
    from reference import operators as plain

    torch, ops, dry, device = check.torch, check.ops, check.dry, check.device
    batch, heads, k, length = (2, 2, 8, 40) if dry else (32, 8, 2048, 32_768)
    bandwidth = check.floors["device_bytes_s"]
    mask = torch.randint(1, 3, (batch, length), device=device).to(torch.int8)
    index = torch.rand(batch, heads, length, device=device).topk(k).indices.sort().values
    entries = index.numel()
    check.compare(
        "split_and_reorder",
        lambda: ops.split_and_reorder(index, mask),
        lambda: plain.split_and_reorder(index, mask),
        entries * (8 + 1 + 8 + 8) / bandwidth,
    )

    dim = 16 if dry else 128  # bfloat16: rows of 256 bytes
    tokens = 20 if dry else 65_536
    keys, values = check.randn(tokens, heads, dim), check.randn(tokens, heads, dim)
    slots = torch.randint(0, tokens, (batch, heads, k), device=device)
    moved = 2 * entries * dim * 2
    check.compare(
        "gather_rows, device memory",
        lambda: ops.gather_rows(keys, values, slots),
        lambda: plain.gather_rows(keys, values, slots),
        2 * moved / bandwidth,
    )
    host = [pool.cpu() if dry else pool.cpu().pin_memory() for pool in (keys, values)]
    few = slots[: max(1, batch // 4)]
    check.compare(
        "gather_rows, pinned host memory",
        lambda: ops.gather_rows(*host, few),
        lambda: plain.gather_rows(*host, few),
        moved * few.shape[0] / batch / check.floors["host_to_device_bytes_s"],
    )
    if not dry:
        found = ops.gather_rows(*host, few)
        wanted = plain.gather_rows(keys, values, few)
        same = all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        said = [] if same else ["differs from the copy in device memory"]
        row = {"operator": "gather_rows, pinned", "cases": 1, "wrong": said, "graph": "not run"}
        check.correct.append(row)

    bits, group, requests = (32, 2, 1) if dry else (128, 4, 8)
    vectors = check.randn(8 if dry else 8192, heads, dim)
    matrix = torch.randint(-127, 128, (heads, dim, bits), device=device).float()
    check.compare(
        "hash_encode",
        lambda: ops.hash_encode(vectors, matrix, norm=True),
        lambda: plain.hash_encode(vectors, matrix, norm=True),
        (vectors.numel() * 2 + vectors.shape[0] * heads * 20) / bandwidth,
    )
    metadata = ops.hash_encode(keys, matrix, norm=True)
    code = ops.hash_encode(check.randn(requests * group, heads, dim), matrix)
    code = code.view(requests, group, heads, -1).transpose(1, 2).contiguous()
    wanted = 40 if dry else length
    rows = torch.randint(0, tokens, (requests, wanted), device=device)
    scored = requests * heads * wanted
    check.compare(
        "hash_score",
        lambda: ops.hash_score(code, metadata, bits, rows),
        lambda: plain.hash_score(code, metadata, bits, rows),
        scored * (20 + 4) / bandwidth,
    )
    partial, query = check.randn(tokens, heads, 32), check.randn(requests, heads, group, 32)
    check.compare(
        "partial_score",
        lambda: ops.partial_score(query, partial, 0.1, rows),
        lambda: torch_partial(query, partial, rows),
        scored * (64 + 4) / bandwidth,
    )
    if not dry and importlib.util.find_spec("flashinfer") is not None:
        time_ranking(check, requests * heads, length, length // 10)


def time_ranking(check: Check, rows: int, length: int, k: int) -> None:
    """The k best in our total order: torch on unique int64 keys, and FlashInfer's radix top-k."""
    torch = check.torch
    import flashinfer

    score = torch.randn(rows, length, device=check.device)
    position = torch.arange(length, device=check.device)

    def ours() -> Any:
        bits = score.view(torch.int32)
        key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) | position
        return (key.topk(k, dim=-1, sorted=False).values & 0xFFFFFFFF).sort(dim=-1).values

    check.compare(
        "top-k in our total order",
        ours,
        lambda: score.topk(k, dim=-1),
        rows * length * 4 / check.floors["device_bytes_s"],
        {"flashinfer_s": lambda: flashinfer.top_k(score, k, tie_break=2)[1].sort(dim=-1)},
    )


def torch_partial(query: Any, keys: Any, slots: Any) -> Any:
    """What the references compute in float64, in the dtype it has."""
    logits = query @ keys[slots].permute(0, 2, 3, 1) * 0.1
    return logits.float().softmax(-1).sum(2)


# --- part 3: sparse attention against dense ---------------------------------------------------


def time_attention(check: Check, deadline: float) -> None:
    """sparse_decode on k of the tokens beside SDPA on all; 8 KV heads, 32 query heads, dim 128."""
    torch, dry = check.torch, check.dry
    heads, group, dim = (2, 2, 16) if dry else (8, 4, 128)
    lengths = (64,) if dry else (8_192, 16_384, 32_768, 65_536, 131_072)
    for length in lengths:
        for batch in (1, 2) if dry else (1, 4, 8, 16, 32):
            if time.monotonic() > deadline:
                say("out of time: the rest of the attention sizes is not measured")
                return
            size = 2 * batch * heads * length * dim * 2
            if not dry and 2 * size > 0.8 * torch.cuda.mem_get_info()[0]:
                say(f"skipped {length} tokens, batch {batch}: not enough memory")
                continue
            try:
                check.attention += attention_rows(check, (batch, heads, group, length, dim))
            except torch.OutOfMemoryError:
                say(f"skipped {length} tokens, batch {batch}: dense attention runs out of memory")
                continue
            say(f"attention: {length} tokens, batch {batch}")


def attention_rows(check: Check, sizes: tuple[int, int, int, int, int]) -> list[Row]:
    """Dense attention once, sparse attention for each share, at one length and batch size."""
    batch, heads, group, length, dim = sizes
    query = check.randn(batch, heads * group, dim)
    keys, values = check.randn(2, batch, heads, length, dim)
    dense = check.seconds(lambda: sdpa(check.torch, query, keys, values), 10)
    rows = []
    for share in (0.05, 0.1, 0.2):
        k = max(1, int(length * share))
        row = attention_row(check, query, keys[:, :, :k], values[:, :, :k])
        row |= {"tokens": length, "batch": batch, "share": share, "dense_s": dense}
        row["speedup"] = dense / row["ours_s"]
        rows.append(row)
    return rows


def sdpa(torch: Any, query: Any, keys: Any, values: Any) -> Any:
    """Dense decode attention; query [B, Hq, D], keys and values [B, H, N, D]."""
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query[:, :, None], keys, values, enable_gqa=True)[:, :, 0]


def attention_row(check: Check, query: Any, keys: Any, values: Any) -> Row:
    """Time, byte floor, error against float64 SDPA; FlashInfer's time where it is installed."""
    torch = check.torch
    keys, values = keys.contiguous(), values.contiguous()
    batch, heads, k, dim = keys.shape
    index = torch.arange(k, device=check.device).expand(batch, heads, -1).contiguous()
    none = keys.new_zeros((1, heads, dim))
    tail = torch.full((batch, 16), -1, device=check.device)
    call = lambda: check.ops.sparse_decode(  # noqa: E731
        query, keys, values, index, none, none, tail, dim**-0.5
    )
    row: Row = {"ours_s": check.seconds(call)}
    row["floor_s"] = 2 * keys.numel() * 2 / check.floors["device_bytes_s"]
    wanted = sdpa(torch, query[:1].double(), keys[:1].double(), values[:1].double())
    row["error"] = float((call()[:1].double() - wanted).abs().max() / wanted.abs().max())
    flashinfer = flashinfer_call(check, query, keys, values)
    if isinstance(flashinfer, str):
        row["flashinfer"] = flashinfer
    else:
        try:
            row["flashinfer"] = check.seconds(flashinfer)
            theirs = flashinfer().reshape(query.shape)[:1].double()  # type: ignore[attr-defined]
            row["flashinfer_error"] = float((theirs - wanted).abs().max() / wanted.abs().max())
        except Exception as error:
            row["flashinfer"] = f"{type(error).__name__}: {error}"
    return row


def flashinfer_call(check: Check, query: Any, keys: Any, values: Any) -> Callable[[], object] | str:
    """FlashInfer's paged decode: each (request, KV head) is a request of G heads, page size 1."""
    if check.dry or importlib.util.find_spec("flashinfer") is None:
        return "not installed"
    torch = check.torch
    try:
        import flashinfer

        batch, heads, k, dim = keys.shape
        pairs = batch * heads
        work = torch.zeros(256 << 20, dtype=torch.uint8, device=check.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(work, "NHD")
        pages = torch.arange(pairs * k, dtype=torch.int32, device=check.device)
        first = torch.arange(0, pairs * k + 1, k, dtype=torch.int32, device=check.device)
        last = torch.ones(pairs, dtype=torch.int32, device=check.device)
        group = query.shape[1] // heads
        wrapper.plan(
            first, pages, last, group, 1, dim, 1, q_data_type=query.dtype, kv_data_type=keys.dtype
        )
        paged = tuple(rows.reshape(pairs * k, 1, 1, dim) for rows in (keys, values))
        grouped = query.reshape(pairs, group, dim)
        return lambda: wrapper.run(grouped, paged)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(argv: list[str] | None = None) -> int:
    """Run the three parts; 1 when a result is wrong, 2 when there is no GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder (%(default)s)")
    parser.add_argument("--dry-run-cpu", action="store_true", help="tiny sizes, no GPU")
    parser.add_argument("--seed", default=os.urandom(4).hex(), help="of the random cases")
    parser.add_argument("--minutes", type=float, default=7.5, help="time for all (%(default)s)")
    args = parser.parse_args(argv)
    if args.dry_run_cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    start = time.monotonic()
    import torch

    if not args.dry_run_cpu and not torch.cuda.is_available():
        print("no CUDA device; --dry-run-cpu runs the code without one", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    check = Check(args.dry_run_cpu, args.seed)
    say(f"seed {args.seed}")
    budget = 60 * args.minutes
    check_correctness(check, 0 if args.dry_run_cpu else 0.45 * budget)
    measure_floors(check)
    time_operators(check)
    time_attention(check, start + 0.95 * budget)
    sys.path.insert(0, str(ROOT / "scripts"))  # PYTHONSAFEPATH leaves it out
    import gpu_report

    found = gpu_report.report(check, time.monotonic() - start)
    (args.out / "gpu_check.json").write_text(json.dumps(found, indent=1) + "\n")
    gpu_report.plot(found, args.out / "gpu_check.png")
    wrong = gpu_report.wrong_results(found)
    gpu_report.show(found, wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
