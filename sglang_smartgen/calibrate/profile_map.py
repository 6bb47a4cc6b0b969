"""The importance map: layers by position, one panel a range, as the paper's Figure 5."""

from __future__ import annotations

from pathlib import Path

from sglang_smartgen.calibrate.errors import CalibrationError
from sglang_smartgen.core.importance import resample
from sglang_smartgen.core.profile import Profile

COLUMNS = 256  # more positions than a printed panel can show


def draw_map(profile: Profile, path: Path) -> None:
    """Write the map as PNG. Raises CalibrationError when matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise CalibrationError(
            "matplotlib is missing; the importance map needs it (pip install matplotlib)"
        ) from None
    manifest = profile.manifest
    count = len(profile.maps)
    figure = Figure(figsize=(1.5 + 3.2 * count, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    sparse = manifest.sparse_layers
    columns = min(COLUMNS, manifest.blocks)
    shown = [resample(importance, columns) for importance in profile.maps]
    # A few blocks are taken in every step; beside them the rest would be one colour.
    top = max(float(value[sparse].quantile(0.98)) for value in shown) or 1.0
    for panel, value, length in zip(panels, shown, manifest.ranges, strict=True):
        image = panel.imshow(
            value.numpy(),
            aspect="auto",
            interpolation="nearest",
            vmin=0.0,
            vmax=top,
            cmap="viridis",
            extent=(0, 100, manifest.layers - 0.5, -0.5),
        )
        panel.set_title(f"{length.start:,} to {length.stop - 1:,} tokens", fontsize=9)
        panel.set_xlabel("position in the prompt, %")
    panels[0].set_ylabel("layer")
    figure.colorbar(image, ax=list(panels), label="selected in share of steps and KV heads")
    figure.suptitle(
        f"Importance of KV blocks, selector {manifest.selector} at {manifest.ratio:.0%}",
        fontsize=10,
    )
    figure.savefig(path, dpi=120, format="png", metadata={"Software": None})
