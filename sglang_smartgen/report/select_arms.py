"""The arms of `smartgen bench select`: a selector, and whether it sees the true query."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sglang_smartgen.calibrate.artifacts import check_request, make_artifact
from sglang_smartgen.calibrate.model import LayeredModel
from sglang_smartgen.calibrate.texts import hash_sequences
from sglang_smartgen.select.artifact import Artifact, ArtifactError, model_hash, read_artifact
from sglang_smartgen.select.base import Selector
from sglang_smartgen.select.registry import make_selector


class Arm(NamedTuple):
    """One column of the comparison."""

    name: str
    selector: str
    lookahead: bool  # the query is predicted from the input of the layer before
    calibrated: bool  # with an artifact; hata has a fallback without one


ARMS = (
    Arm("exact", "exact", lookahead=False, calibrated=False),
    Arm("exact+lookahead", "exact", lookahead=True, calibrated=False),
    Arm("infinigen", "infinigen", lookahead=True, calibrated=True),
    Arm("hata", "hata", lookahead=False, calibrated=True),
    Arm("hata+lookahead", "hata", lookahead=True, calibrated=True),
    Arm("hata-orthogonal", "hata", lookahead=False, calibrated=False),
    Arm("quest", "quest", lookahead=False, calibrated=False),
    Arm("streaming", "streaming", lookahead=False, calibrated=False),
)


def make_selectors(
    model: LayeredModel, sequences: list[list[int]], folder: Path
) -> dict[Arm, Selector]:
    """Return the selector of every arm; calibrates what `folder` lacks.

    `sequences` are the calibration texts as token ids. Raises CalibrationError.
    """
    made: dict[tuple[str, bool], Selector] = {}
    for arm in ARMS:
        key = arm.selector, arm.calibrated
        if key not in made:
            artifact = None
            if arm.calibrated:
                artifact = ensure_artifact(model, sequences, arm.selector, folder)
            made[key] = make_selector(arm.selector, model.shape, artifact=artifact)
    return {arm: made[arm.selector, arm.calibrated] for arm in ARMS}


def artifact_path(
    model: LayeredModel, sequences: list[list[int]], selector: str, folder: Path
) -> Path:
    """Return where `ensure_artifact` keeps the artifact of a selector and these texts."""
    # A short text of a quick run must not take the place of the real artifact.
    digest = hash_sequences(sequences)[:8]
    return folder / f"{model.folder.name}-{selector}-{digest}.safetensors"


def ensure_artifact(
    model: LayeredModel, sequences: list[list[int]], selector: str, folder: Path
) -> Artifact:
    """Return the artifact in `folder`, made anew unless it is of this model, text and options."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = (model_hash(model.folder), hash_sequences(sequences), check_request(selector, {}))
    path = artifact_path(model, sequences, selector, folder)
    if path.is_file():
        try:
            artifact = read_artifact(path)
            manifest = artifact.manifest
            if (manifest.model_hash, manifest.text_hash, manifest.parameters) == wanted:
                return artifact
        except ArtifactError:
            pass  # of an older version, or damaged
    make_artifact(model, sequences, selector, path)
    return read_artifact(path)
