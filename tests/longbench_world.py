"""A tokenizer, items and servers that are small enough to know every value by hand."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from sglang_smartgen.engine.forced_tokens import ForcedTokens
from sglang_smartgen.report.longbench.arms import Arm
from sglang_smartgen.report.longbench.ask import Job
from sglang_smartgen.report.longbench.data import Item
from sglang_smartgen.report.longbench.framing import Prompt

VOCABULARY, SPARE = 50, 49


class WordTokenizer:
    """One token a word, with its leading space; knows every word it has seen."""

    bos_token_id = 0
    all_special_ids = (0, 1, 2)

    def __init__(self, chat_template: str | None = None, adds_bos: bool = False) -> None:
        self.chat_template, self._adds_bos = chat_template, adds_bos
        self.words = ["<s>", "<user>", "<model>"]

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [0] if add_special_tokens and self._adds_bos else []
        for word in re.findall(r"<\w+>|\s?[^\s<]+|\s", text):
            if word not in self.words:
                self.words.append(word)
            ids.append(self.words.index(word))
        return {"input_ids": ids}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.words[i] for i in ids if not (skip_special_tokens and i < 3))

    def apply_chat_template(
        self, messages: Any, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize and add_generation_prompt
        return f"<user>{messages[0]['content']}<model>"


def line(task: str = "multifieldqa_en", **changed: Any) -> dict[str, Any]:
    """The JSON of one item."""
    return {
        "input": "Who?",
        "context": "It was Ann.",
        "answers": ["Ann"],
        "length": 4,
        "dataset": task,
        "language": "en",
        "all_classes": None,
        "_id": "x",
        **changed,
    }


def item(number: int = 1, task: str = "multifieldqa_en", **changed: Any) -> Item:
    """Item `number` of `task`; its answer is `Ann`."""
    values = {"id": f"{task}-{number}", "input": "Who?", "context": "It was Ann.", "length": 4}
    return Item(task, number, **{**values, "answers": ("Ann",), "classes": (), **changed})


def job(number: int = 1, task: str = "multifieldqa_en", reference: int = 3) -> Job:
    """A job whose prompt begins with `number` and whose reference has `reference` tokens."""
    return Job(item(number, task), Prompt([number, 7, 8], False, [5, 3, 9][:reference]), 4)


class FakeAsks:
    """Answers with what item and arm determine, and remembers the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def warm_up(self, job: Job, arms: list[Arm]) -> None:
        self.calls.append(f"{job.item.line} warm-up")

    def predict(self, job: Job, arm: Arm) -> dict[str, Any]:
        self.calls.append(f"{job.item.line} {arm.name}")
        number = job.item.line
        return {
            "task": job.item.task,
            "line": number,
            "_id": job.item.id,
            "arm": arm.name,
            "pred": f"Ann {number} {arm.name}\u2028 über",
            "tokens": [number, len(arm.name)],
            "reference_logprobs": [-number / 4, -0.5],
            "reference_preferred": [number, 5],
        }


class _Request:
    """What ForcedTokens reads of SGLang's request."""

    def __init__(self) -> None:
        self.output_ids: list[int] = []


def step_logits(prompt: list[int], step: int) -> torch.Tensor:
    """float32 [1, VOCABULARY]: what the model of the stub server says at a step."""
    generator = torch.Generator().manual_seed(sum(prompt) * 100 + step)
    logits = torch.randn(1, VOCABULARY, generator=generator)
    logits[:, SPARE] = -60.0  # nobody expects it
    return logits


def decode(body: dict[str, Any]) -> dict[str, Any]:
    """The answer of a server to a request, with greedy sampling of `step_logits`."""
    sampling, request = body["sampling_params"], _Request()
    top: list[list[list[Any]]] = []
    asked: list[list[list[Any]]] = []
    for step in range(sampling["max_new_tokens"]):
        logits = step_logits(body["input_ids"], step)
        if "custom_logit_processor" in body:
            logits = ForcedTokens()(logits, [{**sampling["custom_params"], "__req__": request}])
        logprobs = torch.log_softmax(logits[0], dim=-1)
        values, ids = logprobs.topk(2)
        asked.append([[float(logprobs[i]), i, None] for i in body.get("token_ids_logprob", ())])
        top.append([[float(v), int(i), None] for v, i in zip(values, ids, strict=True)])
        request.output_ids.append(int(ids[0]))
    meta: dict[str, Any] = {
        "completion_tokens": len(request.output_ids),
        "finish_reason": {"type": "length", "length": len(request.output_ids)},
    }
    if body.get("top_logprobs_num"):
        meta |= {"output_top_logprobs": top, "output_token_ids_logprobs": asked}
    return {"text": "Ann", "output_ids": request.output_ids, "meta_info": meta}


@contextmanager
def stub_server(failures: int = 0) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that decodes by `decode`: its URL and the requests it got. The first ones fail."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            failed = len(seen) <= failures
            body = b"busy" if failed else json.dumps(decode(seen[-1])).encode()
            self.send_response(503 if failed else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
