"""SmartGen in a patched SGLang: what its code calls, and what fills its places.

The patches make the places (see `patches/README.md`), `connect` puts SmartGen into them. It runs in
each scheduler process, from SGLang's plugin entry point, as laying the hooks does elsewhere.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from sglang_smartgen.engine import hooking
from sglang_smartgen.engine.hooking import HookError, fired

KV_CLASS = "sglang.srt.disaggregation.utils.get_kv_class"
NO_PLUGIN = (
    "SGLang did not load the plugin 'smartgen' (is SGLANG_PLUGINS set, or the package not "
    "installed?)"
)


def enable(config: str | None) -> None:
    """SGLang's arguments ask for SmartGen: export the configuration, register the option checks.

    Called before SGLang checks its options, in the process that spawns the others. A configuration
    that cannot be used ends the process with one sentence and exit code 2.
    """
    from sglang_smartgen import plugin
    from sglang_smartgen.engine import options
    from sglang_smartgen.launch_server import export_config

    try:
        export_config(config)
    except ValueError as error:
        refuse(str(error))
    if not plugin.ran:
        refuse(NO_PLUGIN)
    options.register()


def require() -> None:
    """SmartGen was asked for: in this scheduler process it is at work, or the process ends."""
    if hooking.carrier is None:
        refuse(NO_PLUGIN)


def connect() -> None:
    """Fill the places of a patched SGLang. Raises HookError when one is missing."""
    from sglang_smartgen.engine.layer_hook import layer_ready
    from sglang_smartgen.engine.observer import Observer

    try:
        from sglang.srt.disaggregation.utils import TransferBackend, register_kv_classes
        from sglang.srt.layers.radix_attention import register_layer_ready_callback
        from sglang.srt.plugins import set_scheduler_observer
    except ImportError as error:
        raise HookError(
            "SmartGen refuses to start: SGLang's files are patched, but this process has loaded "
            f"others ({error})"
        ) from None
    register_kv_classes(TransferBackend.MOONCAKE, _kv_class)
    register_layer_ready_callback(layer_ready)
    set_scheduler_observer(Observer())
    hooking.carrier = "patches"


def refuse(sentence: str) -> NoReturn:
    """End this process with one sentence: SGLang would swallow an exception."""
    print(f"SmartGen: {sentence}", file=sys.stderr, flush=True)
    os._exit(2)


def _kv_class(class_type: Any) -> Any:
    from sglang_smartgen.engine.scheduler_hooks import kv_class

    fired[KV_CLASS] += 1
    return kv_class(class_type)
