"""SmartGen in a patched SGLang: it fills the places of the patches and lays no hook."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_smartgen import launch_server, plugin
from sglang_smartgen.engine import cpu_host, hooking, layer_hook, native, observer, options, runtime
from sglang_smartgen.engine.hooking import HookError
from sglang_smartgen.engine.observer import STANDS_FOR, Observer
from sglang_smartgen.patching.series import PatchError, Series
from sglang_smartgen.patching.tree import find_target


class Ended(Exception):
    """Instead of os._exit."""


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of SGLang in which nothing of SmartGen is placed; its end is an exception."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(native.os, "_exit", end)
    monkeypatch.setattr(hooking, "carrier", None)
    monkeypatch.setattr(hooking, "fired", hooking.fired.__class__())
    monkeypatch.setattr(observer, "fired", hooking.fired)
    monkeypatch.setattr(native, "fired", hooking.fired)
    monkeypatch.setattr(plugin, "ran", False)
    monkeypatch.setenv(launch_server.CONFIG_ENV, "")


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A patched SGLang, as far as `connect` looks at it, in a scheduler process."""
    placed = SimpleNamespace(observer=None, layers=[], providers={})

    def module(name: str, **content: Any) -> None:
        made = ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)

    for name in ("sglang", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.layers"):
        module(name, __path__=[])
    module("sglang.srt.managers", __path__=[])
    module("sglang.srt.managers.scheduler")
    module(
        "sglang.srt.disaggregation.utils",
        TransferBackend=SimpleNamespace(MOONCAKE="mooncake"),
        register_kv_classes=placed.providers.__setitem__,
    )
    module("sglang.srt.layers.radix_attention", register_layer_ready_callback=placed.layers.append)
    module("sglang.srt.plugins", set_scheduler_observer=lambda it: vars(placed).update(observer=it))
    return placed


def test_connect_fills_every_place(sglang: SimpleNamespace) -> None:
    native.connect()
    assert isinstance(sglang.observer, Observer)
    assert sglang.layers == [layer_hook.layer_ready]
    assert list(sglang.providers) == ["mooncake"]
    assert hooking.carrier == "patches"
    native.require()  # does not end the process


def test_connect_refuses_an_sglang_without_the_places(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules["sglang.srt.plugins"], "set_scheduler_observer")
    with pytest.raises(HookError, match="this process has loaded others"):
        native.connect()
    assert hooking.carrier is None and sglang.layers == []


def test_the_observer_has_the_methods_that_the_patch_calls() -> None:
    """The class in the patch, and ours: the same names with the same parameters."""
    target = find_target()
    path = "srt/plugins/__init__.py"
    text = (target / path).read_bytes()
    if b"SchedulerObserver" not in text:
        text = Series().forward(path, text)
    (theirs,) = [
        {m.name: [a.arg for a in m.args.args] for m in c.body if isinstance(m, ast.FunctionDef)}
        for c in ast.parse(text).body
        if isinstance(c, ast.ClassDef) and c.name == "SchedulerObserver"
    ]
    ours = {
        name: list(inspect.signature(inspect.unwrap(method)).parameters)
        for name, method in vars(Observer).items()
        if not name.startswith("_")
    }
    assert ours == theirs
    scheduler = Series()
    called = "".join(
        scheduler.forward(path, content).decode()
        for path in scheduler.manifest.files
        if b"SchedulerObserver" not in (content := (target / path).read_bytes())
        and b"get_scheduler_observer" not in content
    )
    assert not called or all(f"get_scheduler_observer().{name}(" in called for name in ours)


def test_the_observer_stands_for_every_hook() -> None:
    targets = {hook.target for hook in plugin.HOOKS}
    assert {*STANDS_FOR.values(), native.KV_CLASS} == targets


def test_a_call_of_the_observer_is_counted_as_its_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "decode_side", lambda: SimpleNamespace(holds_slots=True))
    assert Observer().holds_kv() is True
    assert hooking.fired == {STANDS_FOR["holds_kv"]: 1}


def test_a_release_is_taken_only_for_a_room_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[Any] = []
    side = SimpleNamespace(
        room={7: object()}.get, release=lambda room, finish, call: released.append((room, finish))
    )
    monkeypatch.setattr(runtime, "decode_side", lambda: side)
    request = SimpleNamespace(
        bootstrap_room=7, kv=SimpleNamespace(holds_kv=True), finished=lambda: False
    )
    assert Observer().takes_release(request, print) is True
    assert released == [(7, "retracted")]
    request.bootstrap_room = 8
    assert Observer().takes_release(request, print) is False
    monkeypatch.setattr(runtime, "decode_side", lambda: None)
    assert Observer().takes_release(request, print) is False


def test_a_layer_is_told_to_p_with_the_end_of_each_prompt_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    side = SimpleNamespace(on_layer=lambda *given: calls.append(given))
    monkeypatch.setattr(runtime, "prefill_side", lambda: side)
    batch = SimpleNamespace(
        extend_seq_lens_cpu=[3, 2], extend_prefix_lens_cpu=[5, 0], req_pool_indices="rows"
    )
    layer_hook.layer_ready(SimpleNamespace(layer_id=4), batch, "q")
    assert calls == [(4, "rows", [8, 2], [3, 2], "q")]
    monkeypatch.setattr(runtime, "prefill_side", lambda: None)
    layer_hook.layer_ready(SimpleNamespace(layer_id=4), batch, "q")
    assert len(calls) == 1


# The plugin.


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, sglang: SimpleNamespace) -> list[str]:
    """What `register` does in a scheduler process that was asked for SmartGen."""
    done: list[str] = []
    monkeypatch.setenv(launch_server.CONFIG_ENV, "{}")
    monkeypatch.setattr(cpu_host, "install", lambda: None)
    monkeypatch.setattr(options, "register", lambda: done.append("options"))
    monkeypatch.setattr(plugin, "connect", lambda: done.append("connect"))
    monkeypatch.setattr(plugin, "install", lambda hooks: done.append(f"{len(hooks)} hooks"))
    monkeypatch.setattr(layer_hook, "wrap_backend_factories", lambda: done.append("wrap"))
    for name in plugin.STALL_LIMITS:
        monkeypatch.setenv(name, "1")
    return done


def test_no_hook_is_laid_in_a_patched_sglang(
    steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "carried", lambda: True)
    plugin.register()
    assert steps == ["options", "connect"]
    assert plugin.ran


def test_hooks_are_laid_in_any_other(steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "carried", lambda: False)
    plugin.register()
    assert steps == ["options", f"{len(plugin.HOOKS)} hooks", "wrap"]


def test_a_partly_patched_sglang_ends_every_process(
    steps: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def partly() -> bool:
        raise PatchError("refuses to start: /x is partly patched")

    monkeypatch.setattr(plugin, "carried", partly)
    monkeypatch.delitem(sys.modules, "sglang.srt.managers.scheduler")  # a launcher, for example
    with pytest.raises(Ended):
        plugin.register()
    assert steps == []
    assert "/x is partly patched" in capsys.readouterr().err
    monkeypatch.setenv(launch_server.CONFIG_ENV, "")  # stock SGLang starts as it always did
    plugin.register()


# What SGLang's arguments call.


def test_enable_exports_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[int] = []
    monkeypatch.setattr(options, "register", lambda: registered.append(1))
    monkeypatch.setattr(plugin, "ran", True)
    native.enable('{"ratio": 0.5}')
    exported = json.loads(os.environ[launch_server.CONFIG_ENV])
    assert (exported["ratio"], registered) == (0.5, [1])
    native.enable(None)  # what is in the environment holds
    assert json.loads(os.environ[launch_server.CONFIG_ENV])["ratio"] == 0.5


@pytest.mark.parametrize(
    ("config", "ran", "said"),
    [('{"ratio": 2}', True, "ratio is 2"), (None, False, "did not load the plugin 'smartgen'")],
)
def test_enable_refuses_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: str | None,
    ran: bool,
    said: str,
) -> None:
    monkeypatch.setattr(plugin, "ran", ran)
    with pytest.raises(Ended):
        native.enable(config)
    error = capsys.readouterr().err
    assert error.startswith("SmartGen: ") and said in error and error.count("\n") == 1


def test_a_scheduler_without_the_plugin_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Ended):
        native.require()
    assert "did not load the plugin 'smartgen'" in capsys.readouterr().err


def test_the_cpu_host_hooks_are_not_laid_in_a_patched_sglang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(cpu_host.STATUS_ENV, '{"cpu engine": "applied"}')
    monkeypatch.setattr(cpu_host, "state_here", lambda: "patched")
    assert cpu_host.hooks() == []
    monkeypatch.setattr(cpu_host, "state_here", lambda: "pristine")
    assert len(cpu_host.hooks()) == 2


# The patched code itself, without importing SGLang: what a diff adds, run alone.


def function_of(path: str, *names: str) -> dict[str, Any]:
    """These functions of a patched file, in a namespace of their own."""
    text = (find_target() / path).read_bytes()
    series = Series()
    if b"SmartGen" not in text:
        text = series.forward(path, text)
    chosen = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    assert len(chosen) == len(names)
    for node in chosen:
        node.decorator_list, node.returns = [], None
        for argument in node.args.args:
            argument.annotation = None
    space: dict[str, Any] = {"os": os}
    exec(compile(ast.Module(chosen, []), path, "exec"), space)
    return space


def test_the_argument_step_enables_smartgen(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "srt/arg_groups/pd_disaggregation_hook.py"
    space = function_of(path, "handle_smartgen", "require_smartgen", "_smartgen")
    enabled: list[Any] = []
    declared: dict[str, Any] = {}
    space["_smartgen"] = lambda: SimpleNamespace(
        enable=enabled.append, require=lambda: enabled.append("required")
    )
    space["declare_resolution"] = lambda args, source, **fields: (
        declared.update(fields),
        vars(args).update(fields),
    )
    space["resolving_view"] = lambda args: args

    def args(**given: Any) -> SimpleNamespace:
        stock = {
            "enable_smartgen": False,
            "smartgen_config": None,
            "disaggregation_transfer_backend": "mooncake",
        }
        return SimpleNamespace(**stock | given)

    space["handle_smartgen"](args())
    space["require_smartgen"]()
    assert enabled == [] and declared == {}
    space["handle_smartgen"](args(enable_smartgen=True))
    space["handle_smartgen"](args(smartgen_config="{}"))
    assert enabled == [None, "{}"] and declared == {}
    space["handle_smartgen"](args(disaggregation_transfer_backend="smartgen"))
    assert enabled == [None, "{}", None]
    assert declared == {
        "disaggregation_transfer_backend": "mooncake",
        "enable_smartgen": True,
    }
    monkeypatch.setenv(launch_server.CONFIG_ENV, "{}")
    space["require_smartgen"]()
    assert enabled[-1] == "required"


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "srt/arg_groups/pd_disaggregation_hook.py"
    space = function_of(path, "_smartgen")
    monkeypatch.setitem(sys.modules, "sglang_smartgen.engine", None)
    with pytest.raises(RuntimeError, match="the package sglang-smartgen cannot be imported"):
        space["_smartgen"]()


def test_a_kernel_that_is_absent_raises_when_it_is_called() -> None:
    space = function_of("srt/utils/common.py", "cpu_kernel")
    space["_sgl_kernel"] = lambda: ImportError("no driver")
    kernel = space["cpu_kernel"]("rotate_input_ids_cpu")
    with pytest.raises(RuntimeError, match=r"sgl_kernel\.rotate_input_ids_cpu was called"):
        kernel(1, other=2)
    space["_sgl_kernel"] = lambda: SimpleNamespace(rotate_input_ids_cpu=len)
    assert space["cpu_kernel"]("rotate_input_ids_cpu") is len


def test_the_patching_folder_imports_no_sglang() -> None:
    code = (
        "import sys, sglang_smartgen.patching.command;"
        "print(sorted({'sglang', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_layer_callback_runs_in_all_three_ways() -> None:
    """Behind each call of the backend in RadixAttention, with the rows of real tokens."""
    path = "srt/layers/radix_attention.py"
    text = (find_target() / path).read_bytes()
    if b"SmartGen" not in text:
        text = Series().forward(path, text)
    calls = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_layer_ready"
    ]
    assert sorted(calls) == [
        "_layer_ready(self, forward_batch, q)",
        "_layer_ready(self, forward_batch, q[:n])",
        "_layer_ready(self, forward_batch, q[:real_num_tokens])",
    ]
    space = function_of(path, "_layer_ready")
    seen: list[Any] = []
    space["_layer_ready_callbacks"] = [lambda *given: seen.append(given)]
    for extend in (False, True):
        mode = SimpleNamespace(is_extend=lambda extend=extend: extend)
        space["_layer_ready"]("layer", batch := SimpleNamespace(forward_mode=mode), "q")
    assert seen == [("layer", batch, "q")]
