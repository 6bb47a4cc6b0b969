"""What one scheduler process knows of its model and its side of SmartGen.

SGLang builds the attention backend first, then the KV manager, then the scheduler's queues, and
none of them is handed the others. This module is the one place where they find each other.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from sglang_smartgen.config import ConfigError, SmartGenConfig, config_from_env
from sglang_smartgen.core.agreement import Agreement
from sglang_smartgen.engine.cuda.step import Step
from sglang_smartgen.engine.device_path import DevicePath, check_device, device_path
from sglang_smartgen.engine.model_facts import ModelFacts, read_model
from sglang_smartgen.transfer.seal import Sealer, sealer_from_env

if TYPE_CHECKING:
    from sglang_smartgen.engine.decode_side import DecodeSide
    from sglang_smartgen.engine.prefill_side import PrefillSide


class _State:
    config: SmartGenConfig | None = None
    path: DevicePath | None = None
    step: Step | None = None
    facts: ModelFacts | None = None
    prefill: PrefillSide | None = None
    decode: DecodeSide | None = None
    sealer: Sealer | None = None
    agreement: Agreement = Agreement()


_state = _State()


def config() -> SmartGenConfig:
    """The configuration of this process. Raises ConfigError when SmartGen is switched off."""
    if _state.config is None:
        _state.config = config_from_env()
    if _state.config is None:
        raise ConfigError("SmartGen is switched off in this process; set --enable-smartgen")
    return _state.config


def path() -> DevicePath:
    """What the kind of this host asks for."""
    if _state.path is None:
        _state.path = device_path(config())
    return _state.path


def on_device() -> bool:
    """Whether this process decodes on the CUDA path."""
    return _state.config is not None and _state.config.device_path != "cpu"


def note_step(rows: list[int], lengths: list[int]) -> None:
    """The decode step that runs next: rows of the batch and their lengths, its token included."""
    _state.step = Step(rows, lengths)


def step() -> Step:
    """The decode step that runs; without rows before the first one."""
    return _state.step or Step([], [])


def sealer() -> Sealer | None:
    """What seals and checks the messages of this process; None where no token is set."""
    return _state.sealer


def read_token() -> None:
    """Read the token once, before anything listens. Raises ConfigError for one too short."""
    try:
        _state.sealer = sealer_from_env()
    except ValueError as error:
        raise ConfigError(str(error)) from None


def remember_model(runner: Any) -> None:
    """Read the facts of a model runner; called by the attention backend's factory.

    A model that SmartGen cannot serve is said in one sentence and raises ConfigError, with which
    SGLang ends the server.
    """
    try:
        _state.facts = read_model(runner)
        warning = check_device(config(), runner.token_to_kv_pool.k_buffer[0].device.type)
        if warning is not None:
            print(f"SmartGen: {warning}", file=sys.stderr, flush=True)
    except ConfigError as error:
        print(f"SmartGen: {error}", file=sys.stderr, flush=True)
        raise


def facts() -> ModelFacts:
    """The facts of this process's model."""
    if _state.facts is None:
        raise RuntimeError("SmartGen: the attention backend was built without its hook")
    return _state.facts


def set_agreement(agreement: Agreement) -> None:
    """Publish how the ranks of this server agree to the hooks."""
    _state.agreement = agreement


def agreement() -> Agreement:
    """How the ranks of this server agree; before the KV manager exists: as one rank."""
    return _state.agreement


def set_prefill_side(side: PrefillSide) -> None:
    """Publish P's side to the hooks."""
    _state.prefill = side


def set_decode_side(side: DecodeSide) -> None:
    """Publish D's side to the hooks and the attention backend."""
    _state.decode = side


def prefill_side() -> PrefillSide | None:
    """P's side, or None on a decode node and before the KV manager exists."""
    return _state.prefill


def decode_side() -> DecodeSide | None:
    """D's side, or None on a prefill node and before the KV manager exists."""
    return _state.decode
