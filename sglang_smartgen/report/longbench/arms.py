"""What is compared: a mode or a whole configuration by name, and which pair of servers runs it.

What one request may override goes with the request, so arms that differ in nothing else share a
pair. `stock` is a pair without SmartGen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from sglang_smartgen.config import PER_REQUEST, ConfigError, Mode, load_config

STOCK = "stock"
MODES = (*get_args(Mode), STOCK)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")


@dataclass(frozen=True)
class Arm:
    """One row of the table.

    pair: SmartGen's configuration of the servers, None = stock. overrides: what its requests
    override.
    """

    name: str
    pair: dict[str, Any] | None
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def cold(self) -> bool:
        """Whether its prompts must be prefilled anew.

        What is dropped in mode proactive_only depends on the prefill, so that it is not measured on
        a prompt that is in P's cache. In the other modes the answer does not depend on it.
        """
        return self.overrides.get("mode") == "proactive_only"

    def to_json(self) -> dict[str, Any]:
        """What is written into a run's config.json."""
        return {"pair": self.pair, "overrides": self.overrides}


def parse_arms(modes: str, named: Sequence[str], config: str, *, own_pair: bool) -> list[Arm]:
    """The arms of `--modes`, then those of `--arm NAME=JSON`; cold ones late, stock last.

    config: what all of them have in common. own_pair False: the servers run already, and only what
    a request may override can be asked for. Raises ConfigError with one sentence.
    """
    base = _given(config)
    arms: dict[str, Arm] = {}
    for mode in (mode.strip() for mode in modes.split(",") if mode.strip()):
        if mode not in MODES or mode in arms:
            raise ConfigError(f"--modes is {modes!r}; allowed is a list of {', '.join(MODES)}")
        arms[mode] = Arm(mode, None) if mode == STOCK else _arm(mode, base, {"mode": mode})
    for text in named:
        name, _, given = text.partition("=")
        if not _NAME.fullmatch(name) or name in arms or name == STOCK or not given:
            raise ConfigError(
                f"--arm is {text!r}; allowed is NAME=JSON with a new name of letters, digits, _ . -"
            )
        arms[name] = _arm(name, base, {"mode": "smartgen", **_given(given)})
    if not arms:
        raise ConfigError("no arm was given; --modes or --arm names at least one")
    if not own_pair:
        for arm in arms.values():
            fixed = sorted(set(arm.pair or ()) - set(PER_REQUEST))
            if fixed:
                raise ConfigError(
                    f"arm {arm.name} sets {', '.join(fixed)}, which the running servers decide; "
                    f"allowed with --url are {', '.join(PER_REQUEST)}"
                )
    # Cold ones late: their prefills push the shared prompt out of P's cache.
    return sorted(arms.values(), key=lambda arm: (arm.name == STOCK, arm.cold))


def groups(arms: Sequence[Arm]) -> list[list[Arm]]:
    """Arms that one pair of servers can run, in the order of their first arm."""
    by_pair: dict[str, list[Arm]] = {}
    for arm in arms:
        by_pair.setdefault(json.dumps(arm.pair, sort_keys=True), []).append(arm)
    return list(by_pair.values())


def _arm(name: str, base: dict[str, Any], given: dict[str, Any]) -> Arm:
    """`given` on top of `base`: what a request can carry goes there, the rest to the servers."""
    load_config(json.dumps({**base, **given}))  # refuses what cannot be used together
    fixed = {key: value for key, value in given.items() if key not in PER_REQUEST}
    asked = {key: value for key, value in given.items() if key in PER_REQUEST}
    return Arm(name, {**base, **fixed}, {**_requested(base), **asked})


def _requested(base: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in base.items() if key in PER_REQUEST}


def _given(text: str) -> dict[str, Any]:
    """The settings that a configuration (JSON or a file) names, once it is known to be right."""
    load_config(text)
    text = text.strip()
    given: dict[str, Any] = json.loads(text if text.startswith("{") else Path(text).read_text())
    return given
