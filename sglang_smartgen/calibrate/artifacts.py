"""Makes one artifact: every layer that is selected from, calibrated in turn."""

from __future__ import annotations

import datetime
import importlib.metadata
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from torch import Tensor

from sglang_smartgen.calibrate.errors import CalibrationError
from sglang_smartgen.calibrate.model import LayeredModel
from sglang_smartgen.calibrate.progress import layer_progress
from sglang_smartgen.calibrate.texts import hash_sequences
from sglang_smartgen.calibrate.walk import walk
from sglang_smartgen.calibrate.work import WorkFolder
from sglang_smartgen.core.geometry import DENSE_LAYERS
from sglang_smartgen.select.artifact import ArtifactError, Manifest, model_hash, write_artifact
from sglang_smartgen.select.base import Selector
from sglang_smartgen.select.registry import selector_class

WORK_FORMAT = 1  # raise it when the same input would give another result


class Made(msgspec.Struct):
    """What a calibration did. `seconds` and `resumed_layers` are of this run."""

    out: str
    selector: str
    model: str
    layers: list[int]  # with tensors in the artifact
    parameters: dict[str, object]
    sequences: int
    tokens: int
    text_hash: str
    resumed_layers: int
    seconds: float


def check_request(selector: str, options: Mapping[str, object]) -> dict[str, object]:
    """Return the complete parameters of calibrating `selector`.

    Raises CalibrationError for a selector that is not known or has nothing to calibrate, and for
    an option that is not one of its calibration.
    """
    try:
        kind = selector_class(selector)
        if getattr(kind.calibrate, "__func__", None) is getattr(
            Selector.calibrate, "__func__", None
        ):
            raise ValueError(f"selector {selector} has nothing to calibrate")
        return kind.resolve(options)
    except ValueError as error:
        raise CalibrationError(str(error)) from None


def selected_layers(model: LayeredModel) -> list[int]:
    """Return the layers that a decode step selects from: full attention, not the dense first ones.

    Raises CalibrationError when the model has none.
    """
    layers = [i for i in range(DENSE_LAYERS, model.layers) if model.window(i) is None]
    if not layers:
        raise CalibrationError(
            f"{model.folder} has no full-attention layer behind its first {DENSE_LAYERS}; "
            "there is nothing to select from"
        )
    return layers


def make_artifact(
    model: LayeredModel,
    sequences: list[list[int]],
    selector: str,
    out: Path,
    options: Mapping[str, object] | None = None,
    quiet: bool = False,
) -> Made:
    """Calibrate `selector` for `model` on token sequences and write the artifact to `out`.

    A run that was stopped is gone on with when everything that decides the result is the same.
    Raises CalibrationError.
    """
    started = time.monotonic()
    parameters = check_request(selector, options or {})
    layers = selected_layers(model)
    try:
        manifest = Manifest(
            selector=selector,
            model_hash=model_hash(model.folder),
            layers=model.shape.layers,
            q_heads=model.shape.q_heads,
            kv_heads=model.shape.kv_heads,
            head_dim=model.shape.head_dim,
            parameters=parameters,
            text_hash=hash_sequences(sequences),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
    except ArtifactError as error:
        raise CalibrationError(str(error)) from None
    facts = msgspec.to_builtins(manifest) | {"created": "", "work": WORK_FORMAT}
    facts |= {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    with WorkFolder(out, facts) as work:
        first, hidden = work.resume()
        _run_layers(model, sequences, selector, parameters, layers, work, first, hidden, quiet)
        tensors: dict[str, Tensor] = {}
        for layer in layers:
            for name, value in work.part(layer).items():
                tensors[f"{name}.{layer}"] = value
        try:
            write_artifact(out, manifest, tensors)
        except OSError as error:
            raise CalibrationError(f"--out {out} cannot be written: {error}") from None
        work.remove()
    return Made(
        out=str(out),
        selector=selector,
        model=model.folder.name,
        layers=layers,
        parameters=parameters,
        sequences=len(sequences),
        tokens=sum(map(len, sequences)),
        text_hash=manifest.text_hash,
        resumed_layers=first,
        seconds=time.monotonic() - started,
    )


def _run_layers(
    model: LayeredModel,
    sequences: list[list[int]],
    selector: str,
    parameters: dict[str, object],
    layers: list[int],
    work: WorkFolder,
    first: int,
    hidden: list[Tensor],
    quiet: bool,
) -> None:
    kind = selector_class(selector)
    stop = layers[-1] + 1  # what is behind the last one needs no run
    hidden = hidden or [model.embed(ids) for ids in sequences]
    what = f"calibrating {selector} for {model.folder.name}"
    with layer_progress(what, stop, done=first, quiet=quiet) as advance:
        for step in walk(model, hidden, first=first, stop=stop):
            made: dict[str, Tensor] = {}
            if step.layer in layers:
                try:
                    made = kind.calibrate(model.shape, step.layer, step.samples, parameters)
                except ValueError as error:
                    raise CalibrationError(f"layer {step.layer}: {error}") from None
            work.save(step.layer, made, step.hidden)
            advance(step.layer + 1)
