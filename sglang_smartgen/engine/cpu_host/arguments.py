"""Reading and extending SGLang's command line without its parser (which would import SGLang)."""

from __future__ import annotations

from pathlib import Path


def given(argv: list[str], *flags: str) -> bool:
    """Whether the user gave one of `flags`, on the command line or in the file of `--config`."""
    names = {flag.removeprefix("--").replace("-", "_") for flag in flags}
    return any(_is_flag(word, flags) for word in argv) or bool(names & set(_config_file(argv)))


def value(argv: list[str], flag: str) -> str | None:
    """The value of `flag` (the last one wins, as in argparse), or None where it was not given."""
    found: str | None = None
    for position, word in enumerate(argv):
        if word.startswith(flag + "="):
            found = word.partition("=")[2]
        elif word == flag and position + 1 < len(argv):
            found = argv[position + 1]
    if found is None:
        found = _config_file(argv).get(flag.removeprefix("--").replace("-", "_"))
    return found


def _is_flag(word: str, flags: tuple[str, ...]) -> bool:
    return word.split("=", 1)[0] in flags


def _config_file(argv: list[str]) -> dict[str, str]:
    """Top-level keys of SGLang's YAML argument file; empty where there is none or it is unreadable.

    A bad file is left for SGLang to complain about.
    """
    name = None
    for position, word in enumerate(argv):
        if word == "--config" and position + 1 < len(argv):
            name = argv[position + 1]
    if name is None:
        return {}
    import yaml

    try:
        content = yaml.safe_load(Path(name).read_text())
    except (OSError, yaml.YAMLError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {str(key).replace("-", "_"): str(item) for key, item in content.items()}
