"""SmartGen's server options inside SGLang's option pipeline: backend name, defaults, refusals."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from sglang_smartgen.config import ConfigError, config_from_env
from sglang_smartgen.engine import refusals

_registered = False


def register() -> None:
    """Add attention backend `smartgen` and the checks; runs in every SGLang process.

    A second call does nothing.
    """
    global _registered
    if _registered:
        return
    _registered = True
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    add_attention_backend_choices([refusals.BACKEND])
    register_attention_backend(refusals.BACKEND)(_build_backend)
    register_resolution_hook("handle_pd_disaggregation")(_resolve)


def _build_backend(runner: Any) -> Any:
    from sglang_smartgen.engine import runtime

    try:
        return runtime.path().attention(runner)
    except ConfigError as error:
        print(f"SmartGen: {error}", file=sys.stderr, flush=True)
        raise


def _resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Check the user's options first, then SGLang's own step, then what SmartGen sets itself."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    try:
        refusals.check_options(resolving_view(server_args))
    except ConfigError as error:
        print(f"SmartGen: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    previous(server_args)
    config = config_from_env()
    graphs = config is not None and config.device_path == "cuda_graph"
    declared = refusals.declare_options(resolving_view(server_args), graphs)
    declare_resolution(server_args, "smartgen", **declared)
