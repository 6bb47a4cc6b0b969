"""Load from SGLang's own `sglang.benchmark.serving`, with a mode of ours in every request.

`--extra-request-body` is laid over the body that it builds, so it must bring the whole of
`sampling_params`, the number of tokens included, with our `custom_params` in it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_smartgen.report.client import RequestError


def write_prompts(path: Path, texts: Sequence[str]) -> None:
    """A file for its dataset `custom`: one conversation a prompt; the answer is not used."""
    with path.open("w") as file:
        for text in texts:
            turns = [{"content": text}, {"content": "not used"}]
            file.write(json.dumps({"conversations": turns}) + "\n")


def command(
    *,
    url: str,
    model: Path,
    prompts: Path,
    requests: int,
    concurrency: int,
    steps: int,
    smartgen: Mapping[str, Any] | None,
    out: Path,
) -> list[str]:
    """The command line that sends `requests` prompts, at most `concurrency` at once."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True}
    if smartgen is not None:
        sampling["custom_params"] = {"smartgen": dict(smartgen)}
    return [
        *(sys.executable, "-P", "-m", "sglang.benchmark.serving"),
        *("--backend", "sglang", "--base-url", url),
        *("--model", str(model), "--tokenizer", str(model)),
        *("--dataset-name", "custom", "--dataset-path", str(prompts)),
        *("--sharegpt-output-len", str(steps), "--num-prompts", str(requests)),
        *("--max-concurrency", str(concurrency), "--warmup-requests", "0"),
        *("--extra-request-body", json.dumps({"sampling_params": sampling})),
        *("--output-file", str(out), "--output-details", "--disable-tqdm"),
    ]


def run(line: Sequence[str], out: Path, timeout_s: float) -> dict[str, Any]:
    """Run it; its report. Raises RequestError when it fails, is late, or a request failed."""
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise RequestError(
            f"sglang.benchmark.serving did not end within {timeout_s:.0f} s"
        ) from None
    if done.returncode or not out.exists():
        tail = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise RequestError(f"sglang.benchmark.serving ended with {done.returncode}: {tail}")
    report: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    errors = [error for error in report.get("errors", []) if error]
    if errors:
        raise RequestError(f"{len(errors)} requests failed: {errors[0].strip().splitlines()[-1]}")
    return report
