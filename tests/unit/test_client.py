"""TTFT, TTST and TBT from scripted event streams, and what is an error."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sglang_smartgen.report.client import (
    Answer,
    Client,
    add_event,
    conclude,
    parse_stream,
    request_body,
)


def data(ids: list[int], text: str, total: int, finish: dict[str, Any] | None = None) -> Any:
    """One answer of SGLang, as it was seen on the wire."""
    meta = {
        "id": "r",
        "prompt_tokens": 7,
        "completion_tokens": total,
        "cached_tokens": 0,
        "finish_reason": finish,
    }
    return {"text": text, "output_ids": ids, "meta_info": meta}


def collect(*events: tuple[float, Any]) -> Answer:
    answer = Answer()
    for event in events:
        add_event(answer, event)
    conclude(answer)
    return answer


LENGTH = {"type": "length", "length": 4}
CUMULATIVE = (
    (2.0, data([5], "a", 1)),
    (2.5, data([5, 5], "aa", 2)),
    (2.75, data([5, 5, 6], "aab", 3)),
    (3.25, data([5, 5, 6, 7], "aabc", 4, LENGTH)),
)
INCREMENTAL = (
    (2.0, data([5], "a", 1)),
    (2.5, data([5], "a", 2)),
    (2.75, data([6], "b", 3)),
    (3.25, data([7], "c", 4, LENGTH)),
)


@pytest.mark.parametrize("events", [CUMULATIVE, INCREMENTAL])
def test_times_of_an_answer(events: tuple[tuple[float, Any], ...]) -> None:
    answer = collect(*events)
    assert (answer.text, answer.token_ids) == ("aabc", [5, 5, 6, 7])
    assert answer.ttft_s == 2.0
    assert answer.ttst_s == 2.5
    assert answer.inter_token_s == [0.5, 0.25, 0.5]
    assert answer.tbt_s == 0.375  # without the first gap
    assert answer.error is None and answer.finish_reason == "length"
    assert (answer.prompt_tokens, answer.rid) == (7, "r")


def test_tokens_that_come_together_share_their_time() -> None:
    answer = collect((1.0, data([1], "a", 1)), (3.0, data([1, 2, 3], "abc", 3, LENGTH)))
    assert answer.token_times == [1.0, 3.0, 3.0]
    assert (answer.ttst_s, answer.inter_token_s, answer.tbt_s) == (3.0, [2.0, 0.0], 0.0)


def test_a_last_event_without_a_new_token_takes_no_time() -> None:
    answer = collect((1.0, data([1], "a", 1)), (9.0, data([1], "a", 1, {"type": "stop"})))
    assert answer.token_times == [1.0]
    assert answer.ttst_s is None and answer.tbt_s is None


def test_no_token_has_no_times() -> None:
    answer = collect((1.0, {"error": {"message": "room 3 failed"}}))
    assert answer.error == "room 3 failed"
    assert (answer.ttft_s, answer.ttst_s, answer.inter_token_s) == (None, None, [])


def test_an_abort_keeps_what_came_and_tells_the_cause() -> None:
    abort = {"type": "abort", "message": "fetch failed", "status_code": 500}
    answer = collect((1.0, data([1, 2], "ab", 2)), (2.0, data([], "", 0, abort)))
    assert (answer.text, answer.token_ids) == ("ab", [1, 2])
    assert answer.error == "fetch failed"


def test_a_stream_that_breaks_off_is_an_error() -> None:
    assert collect((1.0, data([1], "a", 1))).error == "the stream broke off after 1 tokens"


def test_parse_stream_ends_at_done_and_skips_what_is_no_data() -> None:
    lines = [b'data: {"a": 1}', b"", b": ping", b"data: [DONE]", b'data: {"a": 2}']
    assert list(parse_stream(lines)) == [{"a": 1}]


def test_request_body_of_text_and_of_ids() -> None:
    plain = {"max_new_tokens": 3, "ignore_eos": False, "smartgen": None, "rid": None}
    assert request_body("hi", **plain, top_logprobs=0) == {
        "text": "hi",
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 3, "ignore_eos": False},
    }
    full = plain | {"smartgen": {"mode": "full"}, "rid": "r", "ignore_eos": True}
    assert request_body([1, 2], **full, top_logprobs=5) == {
        "input_ids": [1, 2],
        "rid": "r",
        "stream": False,
        "return_logprob": True,
        "top_logprobs_num": 5,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": 3,
            "ignore_eos": True,
            "custom_params": {"smartgen": {"mode": "full"}},
        },
    }


class Script(BaseHTTPRequestHandler):
    """Answers /generate from `events`; a broken script ends without `[DONE]`."""

    events: tuple[Any, ...] = ()
    status = 200
    hung_up = threading.Event()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.end_headers()
        try:
            for event in self.events:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.flush()
        except OSError:
            type(self).hung_up.set()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[type[Script], Client]]:
    class Handler(Script):
        hung_up = threading.Event()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield Handler, Client(f"http://127.0.0.1:{http.server_address[1]}", timeout_s=5)
        http.shutdown()


def test_client_streams_text_as_it_comes(server: tuple[type[Script], Client]) -> None:
    handler, client = server
    handler.events = tuple(event for _, event in CUMULATIVE)
    pieces: list[str] = []
    answer = client.generate("x", max_new_tokens=4, on_text=pieces.append)
    assert pieces == ["a", "a", "b", "c"]
    assert answer.error is None and answer.text == "aabc"
    assert answer.ttft_s is not None and 0 < answer.ttft_s < 5


def test_client_reports_a_refusal(server: tuple[type[Script], Client]) -> None:
    handler, client = server
    handler.status, handler.events = 503, ({"detail": "busy"},)
    answer = client.generate("x", max_new_tokens=4)
    assert answer.error is not None
    assert "503" in answer.error and "busy" in answer.error


def test_client_reports_that_nobody_listens() -> None:
    answer = Client("http://127.0.0.1:9").generate("x", max_new_tokens=4)
    assert answer.error is not None and answer.error.startswith("connection lost")


def test_client_hangs_up(server: tuple[type[Script], Client]) -> None:
    handler, client = server
    handler.events = tuple(data([1] * n, "a" * 50000, n) for n in range(1, 400))
    answer = client.generate("x", max_new_tokens=400, hang_up_after=2)
    assert answer.error == "hung up after 2 tokens"
    assert len(answer.token_ids) == 2
    assert handler.hung_up.wait(10)


def test_top_candidates_of_every_token() -> None:
    event = data([4, 9], "ab", 2, LENGTH)
    event["meta_info"]["output_top_logprobs"] = [
        [[-0.5, 4, None], [-1.5, 8, None]],
        [[-0.1, 9, None], [-3.0, 2, None]],
    ]
    answer = collect((1.0, event))
    assert answer.top_logprobs == [[(4, -0.5), (8, -1.5)], [(9, -0.1), (2, -3.0)]]
