from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from engine.config import RewardSection, TaskSection
from engine.errors import ConfigError, ScoringError
from engine.protocols import Score
from engine.reward.judge import Settings, settings, verdict
from engine.reward.pool import ScoringPool
from engine.types import Message, Rollout, Task

TEXTS = {"question": "What is 2 + 3?", "completion": "It is 5.", "answer": "5"}


class Server(ThreadingHTTPServer):
    """Answers requests with `replies` in turn, (status, body); the last one again and again. None: never."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: list[tuple[int, bytes] | None] = []
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][0]["content"] for _, _, body in self.requests]

    def will_say(self, *contents: str | None) -> None:
        self.replies = [(200, completion(content)) for content in contents]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, dict(self.headers), body))
        reply = self.server.replies.pop(0) if len(self.server.replies) > 1 else self.server.replies[0]
        if reply is None:
            self.server.released.wait()
            return
        status, data = reply
        self.send_response(status)
        if status == 302:
            self.send_header("Location", f"{self.server.url}/elsewhere")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.server.requests.append((self.path, dict(self.headers), {}))
        self.send_response(403)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def completion(content: str | None) -> bytes:
    return json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": content}}]}).encode()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


def asked(server: Server, **params: Any) -> float | None:
    return verdict(Settings(url=server.url, model="m", **params), TEXTS, None)


@pytest.mark.parametrize(
    ("said", "scale", "value"),
    [
        ("7", {}, 0.7),
        ("Wrong in 2 places.\n\n**8.5**", {}, 0.85),
        ("8/10", {}, 0.8),
        ("<think>10? No.</think> 3", {}, 0.3),
        ("0", {}, 0.0),
        ("10", {}, 1.0),
        ("4", {"min": 1, "max": 5}, 0.75),
        ("-1", {"min": -2, "max": 2}, 0.25),
        # No verdicts: no number, one off the scale, nothing said.
        ("It is perfect!", {}, None),
        ("11", {}, None),
        ("0", {"min": 1, "max": 5}, None),
        ("1e999", {}, None),
        ("<think>7", {}, None),
        ("", {}, None),
        (None, {}, None),
    ],
)
def test_the_last_number_on_its_scale(server: Server, said: str | None, scale: dict[str, float], value: float) -> None:
    server.will_say(said)
    assert asked(server, **scale) == (None if value is None else pytest.approx(value))


def test_what_is_asked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.will_say("10")
    asked(server, key_env="JUDGE_KEY", prompt="{question}|{completion}|{answer}|{min}-{max}|{other} {}")
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    content = "What is 2 + 3?|It is 5.|5|0-10|{other} {}"
    assert body == {"model": "m", "messages": [{"role": "user", "content": content}], "temperature": 0}


def test_the_default_prompt_shows_everything(server: Server) -> None:
    server.will_say("10")
    asked(server)
    assert all(text in server.prompts[0] for text in TEXTS.values())
    assert "from 0 (wrong) to 10 (right)" in server.prompts[0]


def test_text_expands_no_placeholder(server: Server) -> None:
    server.will_say("10")
    hostile = {"question": "{completion}", "completion": "{answer} {question} {max}", "answer": r"\1 {completion}"}
    verdict(Settings(url=server.url, model="m", prompt="{question}|{completion}|{answer}"), hostile, None)
    assert server.prompts == [r"{completion}|{answer} {question} {max}|\1 {completion}"]


def test_an_overloaded_judge_is_asked_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("engine.reward.judge.time.sleep", waits.append)
    server.replies = [(500, b""), (429, b"{}"), (503, b""), (200, completion("5"))]
    assert asked(server) == 0.5
    assert waits == [0.25, 0.5, 1.0]


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (401, b"no such key", "HTTP Error 401: Unauthorized: no such key"),
        (404, b"", "HTTP Error 404"),
        (200, b"<html>", "JSON is malformed"),
        (200, b"{}", "missing required field `choices`"),
        (200, b'{"choices": []}', "list index out of range"),
    ],
)
def test_a_judge_that_cannot_be_used(server: Server, status: int, body: bytes, why: str) -> None:
    server.replies = [(status, body)]
    with pytest.raises(ScoringError, match=f"the judge at {server.url}/chat/completions gave no answer: .*{why}"):
        asked(server)
    assert len(server.requests) == 1


def test_the_key_goes_to_no_other_address(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.replies = [(302, b"")]
    with pytest.raises(ScoringError, match="HTTP Error 403"):
        asked(server, key_env="JUDGE_KEY")
    assert ["Authorization" in headers for _, headers, _ in server.requests] == [True, False]


def scored(server_url: str, timeout_s: float, *completions: str) -> list[Score]:
    """By a pool, with the judge's word and half the length as the reward."""
    section = TaskSection(
        env="jsonl", name="t", params={"score": {"judge": 1, "length": 0.5}, "judge": {"url": server_url, "model": "m"}}
    )
    task = Task(
        task_id="t/0", env="t", index=0, answer={"answer": "5"}, seed=0,
        messages=(Message("system", "Be brief."), Message("user", "What is 2 + 3?")),
    )  # fmt: skip

    async def main() -> list[Score]:
        pool = ScoringPool([section], RewardSection(timeout_s=timeout_s), 4)
        try:
            return [await pool.score(task, rollout(text)) for text in completions]
        finally:
            await pool.close()

    return asyncio.run(main())


def rollout(text: str) -> Rollout:
    return Rollout(
        token_ids=np.zeros(2, np.int32), trainable=np.ones(2, np.bool_), logprobs=np.zeros(2, np.float32),
        version_spans=((0, 0),), stop_reason="stop", env="t", lease_id="l", index_in_group=0, seed=0, text=text,
    )  # fmt: skip


def test_a_judges_word_is_a_part_and_none_is_marked(server: Server) -> None:
    server.will_say("8", "I refuse.", "4")
    first, second, third = scored(server.url, 20.0, "<think>6?</think>It is 5.", "5", "5")
    assert first == Score(pytest.approx(0.8 - 0.25), "5", {"judge": 0.8, "length": -0.5})
    assert second == Score(None, "5", {"length": -0.5, "unjudged": 1.0})
    assert third.parts["judge"] == 0.4
    assert "What is 2 + 3?" in server.prompts[0]
    assert "It is 5." in server.prompts[0]
    assert "6?" not in server.prompts[0]


@pytest.mark.parametrize("reply", [None, (503, b"")])
def test_a_judge_that_never_answers_is_a_timeout(server: Server, reply: tuple[int, bytes] | None) -> None:
    server.replies = [reply]
    assert scored(server.url, 1.0, "5") == [Score(None, timed_out=True)]
    assert server.requests


def test_a_judge_that_is_not_there_ends_the_run() -> None:
    with Server() as closed:
        url = closed.url
    with pytest.raises(ScoringError, match="refused") as caught:
        scored(url, 20.0, "5")
    assert "the scorer of task t/0 raised" in str(caught.value)
    assert caught.value.remedy == "check params.judge: url, model, key_env"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"model": "m"}, r"judge = .*missing required field `url`.*\n.*it takes url, model, prompt, key_env, min, max"),
        ({"url": "http://h/v1"}, "missing required field `model`"),
        ({"url": "http://h/v1", "model": "m", "modle": "m"}, "unknown field `modle`"),
        ({"url": 5, "model": "m"}, r"Expected `str`, got `int` - at `\$\.url`"),
        ({"url": "file:///etc/passwd", "model": "m"}, r"judge\.url = 'file.*is no http or https URL"),
        ({"url": "http://h/v1", "model": "m", "prompt": "{answer}"}, r"judge\.prompt = .*shows the judge no"),
        ({"url": "http://h/v1", "model": "m", "min": 5, "max": 5}, r"judge\.max = 5\.0: is not above .*min = 5\.0"),
        ({"url": "http://h/v1", "model": "m", "key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY.*is not in the environment"),
        ("http://h/v1", "Expected `object`, got `str`"),
    ],
)
def test_settings_that_cannot_work_are_refused(params: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        settings(params, "tasks.0.params.judge")
    assert caught.value.path.startswith("tasks.0.params.judge")


@pytest.mark.parametrize("params", [{"score": "judge"}, {"judge": {"url": "http://h/v1", "model": "m"}}])
def test_the_judge_and_its_settings_go_together(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.0\.params\.judge = .*: goes with the scorer 'judge'"):
        ScoringPool([TaskSection(env="jsonl", params=params)], RewardSection(), 4)
