"""The engine behind a URL, against a server that speaks vLLM's schema."""

from __future__ import annotations

import concurrent.futures
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from engine.errors import ConfigError, GenerationError, MissingError, StalledError
from engine.types import SegmentRequest
from evals.server import ServerEngine

TINY = {"id": "tiny", "object": "model", "created": 1, "root": "/models/tiny", "max_model_len": 512}


class Server(ThreadingHTTPServer):
    """`complete(body)` makes what /v1/completions answers, (status, anything JSON or bytes); None: nothing."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: list[dict[str, Any]] = [TINY]
        self.bodies: list[dict[str, Any]] = []
        self.complete: Callable[[dict[str, Any]], tuple[int, Any] | None] = counting
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.reply(200, {"object": "list", "data": self.server.models})

    def do_POST(self) -> None:
        assert self.path == "/v1/completions"
        assert self.headers["Content-Type"] == "application/json"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if (answer := self.server.complete(body)) is not None:
            self.reply(*answer)

    def reply(self, status: int, said: Any) -> None:
        data = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def completion(**choice: Any) -> dict[str, Any]:
    """As vLLM 0.32 answers, fields that nothing is made of included."""
    return {
        "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "tiny", "usage": {"prompt_tokens": 1},
        "choices": [{"index": 0, "text": "?", "stop_reason": None, "logprobs": None, "prompt_logprobs": None,
                     "prompt_token_ids": [1], "finish_reason": "length", "token_ids": [1], **choice}],
    }


def counting(body: dict[str, Any]) -> tuple[int, Any]:
    """A model that counts on from the prompt's last token."""
    made = [body["prompt"][-1] + 1 + place for place in range(body["max_tokens"])]
    logprobs = {"tokens": ["?"] * len(made), "token_logprobs": [-0.5 * token for token in made],
                "text_offset": [0] * len(made), "top_logprobs": [{"?": -1.0}] * len(made)}
    return 200, completion(token_ids=made, logprobs=logprobs)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.closing.set()
        server.shutdown()
        thread.join()


def engine(server: Server, *, limit_s: float = 30.0, at_once: int = 4) -> ServerEngine:
    return ServerEngine(server.url, end_token_ids=(2, 7), limit_s=limit_s, at_once=at_once)


def request(*prompt: int, new_tokens: int = 3) -> SegmentRequest:
    return SegmentRequest(
        request_id="one", token_ids=np.asarray(prompt, np.int32), max_new_tokens=new_tokens, temperature=0.7, seed=5,
    )


def test_tokens_in_and_out(server: Server) -> None:
    (segment,) = engine(server).generate([request(4, 10)])
    assert segment.token_ids.dtype == np.int32
    assert segment.token_ids.tolist() == [11, 12, 13]
    assert segment.logprobs.dtype == np.float32
    assert segment.logprobs.tolist() == [-5.5, -6.0, -6.5]
    assert (segment.ended, segment.version_spans) == ("length", ((0, 0),))


def test_every_sampling_setting_is_sent(server: Server) -> None:
    """What vLLM 0.32 fills from generation_config.json when it is null: `_DEFAULT_SAMPLING_PARAMS` and stop tokens."""
    engine(server).generate([request(4, 10)])
    assert server.bodies == [{
        "model": "tiny", "prompt": [4, 10], "max_tokens": 3, "temperature": 0.7, "seed": 5, "n": 1, "top_p": 1.0,
        "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "stop": [], "stop_token_ids": [2, 7], "ignore_eos": True, "logprobs": 0, "return_token_ids": True,
    }]


def test_log_probs_of_what_is_given(server: Server) -> None:
    first, second = {"10": {"logprob": -0.25, "rank": 1}}, {"7": {"logprob": -3.0, "rank": 9}, "5": {"logprob": -0.1}}
    server.complete = lambda _: (200, completion(prompt_logprobs=[None, first, second]))
    (scored,) = engine(server).score([np.asarray([4, 10, 7], np.int32)])
    assert scored.logprobs.dtype == np.float32
    assert scored.logprobs.tolist() == [0.0, -0.25, -3.0]
    assert scored.greedy.tolist() == [False, True, False]
    (body,) = server.bodies
    assert (body["prompt"], body["prompt_logprobs"], body["max_tokens"]) == ([4, 10, 7], 1, 1)


def test_requests_are_under_way_together_and_answers_keep_their_order(server: Server) -> None:
    """The first is answered only once the last has been: one at a time would never end."""
    last_answered = threading.Event()

    def last_first(body: dict[str, Any]) -> tuple[int, Any]:
        if body["prompt"] == [30]:
            last_answered.set()
        assert last_answered.wait(20)
        return counting(body)

    server.complete = last_first
    segments = engine(server, at_once=3).generate([request(10), request(20), request(30)])
    assert [int(segment.token_ids[0]) for segment in segments] == [11, 21, 31]


def test_what_the_server_says_of_its_model(server: Server) -> None:
    found = engine(server)
    assert (found.model_name, found.max_length, found.version.number) == ("tiny", 512, 0)


def test_a_digest_goes_by_name_and_path_and_not_by_when_it_was_asked(server: Server) -> None:
    """vLLM's `created` is the time of the question."""
    digests = []
    for change in ({}, {"created": 2}, {"max_model_len": 256}, {"root": "/models/other"}, {"id": "other"}):
        server.models = [TINY | change]
        digests.append(engine(server).version.digest)
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests[2:])) == 3


def test_a_server_of_several_models_is_refused_with_their_names(server: Server) -> None:
    server.models = [TINY, TINY | {"id": "step-20"}]
    with pytest.raises(ConfigError, match=r"--base-url = .* serves tiny, step-20, not just one model"):
        engine(server)


def test_what_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="--base-url = 'localhost:8000'"):
        ServerEngine("localhost:8000", end_token_ids=(), limit_s=1.0)


def test_no_server(free_port: int) -> None:
    with pytest.raises(MissingError, match=f"http://127.0.0.1:{free_port}/v1/models"):
        ServerEngine(f"http://127.0.0.1:{free_port}/v1", end_token_ids=(), limit_s=30.0)


def test_a_server_that_went_away(server: Server) -> None:
    asked = engine(server)
    asked._url = asked._url.replace(str(server.server_port), "1")
    with pytest.raises(MissingError, match="no server answers"):
        asked.generate([request(1)])


@pytest.mark.parametrize("status", [400, 401, 429, 500])
def test_a_refusal_has_the_servers_own_words(server: Server, status: int) -> None:
    server.complete = lambda _: (status, {"error": {"message": "This model's maximum context length is 512"}})
    with pytest.raises(GenerationError, match=f"answered {status}: .*maximum context length is 512"):
        engine(server).generate([request(1), request(2)])


def test_an_answer_that_does_not_come(server: Server) -> None:
    asked = engine(server, limit_s=0.2)
    server.complete = lambda _: None if server.closing.wait(20) else (500, {})
    with pytest.raises(StalledError, match=r"within 0\.2 s"):
        asked.generate([request(1)])


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"<html>", "cannot be read"),
        (completion(token_ids=None), "token_ids"),
        (completion(token_ids=[1, 2], logprobs={"token_logprobs": [-1.0]}), "2 tokens, 1 log-probs"),
        (completion(token_ids=[1], logprobs=None), "1 tokens, 0 log-probs"),
        (completion(token_ids=[1], logprobs={"token_logprobs": [-1.0]}, finish_reason="abort"), "the end 'abort'"),
        ({"choices": []}, "0 completions"),
    ],
)
def test_completions_that_are_none(server: Server, said: Any, why: str) -> None:
    server.complete = lambda _: (200, said)
    with pytest.raises(GenerationError, match=why):
        engine(server).generate([request(1)])


@pytest.mark.parametrize(
    ("prompt_logprobs", "why"),
    [
        (None, "0 log-probs for a prompt of 2"),
        ([None], "1 log-probs for a prompt of 2"),
        ([None, {"9": {"logprob": -1.0, "rank": 1}}], "leave out"),
        ([None, None], "leave out"),
    ],
)
def test_scores_that_are_none(server: Server, prompt_logprobs: Any, why: str) -> None:
    server.complete = lambda _: (200, completion(prompt_logprobs=prompt_logprobs))
    with pytest.raises(GenerationError, match=why):
        engine(server).score([np.asarray([1, 2], np.int32)])


def test_nothing_is_asked_after_a_stop(server: Server) -> None:
    """While the first of three is under way, one at a time."""
    asked = engine(server, at_once=1)

    def stopping(body: dict[str, Any]) -> tuple[int, Any]:
        asked.stop()
        return counting(body)

    server.complete = stopping
    for _ in range(2):
        with pytest.raises(concurrent.futures.CancelledError):
            asked.generate([request(1), request(2), request(3)])
    assert [body["prompt"] for body in server.bodies] == [[1]]
