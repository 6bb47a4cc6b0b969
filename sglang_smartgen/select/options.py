"""Options of a selector: known names, the types of their defaults, and what an artifact fixes."""

from __future__ import annotations

from collections.abc import Mapping


def resolve_options(
    name: str,
    defaults: Mapping[str, object],
    given: Mapping[str, object],
    fixed: Mapping[str, object],
) -> dict[str, object]:
    """Return `defaults`, overridden by `fixed` (the artifact's), then by `given`.

    Every value has the type of its default; an int passes for a float. Raises ValueError with one
    sentence for an unknown name, a value of another type, or one that contradicts `fixed`.
    """
    out = dict(defaults)
    for source in (fixed, given):
        for key, value in source.items():
            if key not in defaults:
                allowed = ", ".join(sorted(defaults)) or "none"
                raise ValueError(f"selector {name} has no option {key!r}; allowed are {allowed}")
            wanted = type(defaults[key])
            if wanted is float and type(value) is int:
                value = float(value)
            if type(value) is not wanted:
                raise ValueError(f"{key} is {value!r}; it must be a {wanted.__name__}")
            if source is given and key in fixed and fixed[key] != value:
                raise ValueError(f"{key} is {value!r}; the artifact was made with {fixed[key]!r}")
            out[key] = value
    return out
