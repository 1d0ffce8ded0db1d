"""A whole suite through lm-eval, on an engine without a model."""

from __future__ import annotations

import asyncio
import math

import msgspec
import numpy as np
import pytest
from suite_of_sums import Answering, sums_suite
from transformers import AutoTokenizer

from engine import clock
from engine.errors import GenerationError
from engine.generate.fake import FakeGenerator
from engine.observe.terminal import SilentTerminal
from engine.types import SegmentRequest, Version
from evals.model import OnLoop
from evals.result import SuiteResult
from evals.run import Asked, evaluate_suite


@pytest.fixture
def ask(tmp_path, tiny_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)

    def asking(answer, *, digest="w", out="sums.json", examples=0, **changes):
        suite = sums_suite(tmp_path, examples=examples)
        engine = Answering(tokenizer, answer)
        asked = Asked(model="tiny", version=Version(number=3, digest=digest), step=3, settings={"dtype": "float32"},
                      limit=0, temperature=1.0, max_length=64)
        asked = msgspec.structs.replace(asked, **changes)
        result = clock.run(evaluate_suite(suite, asked, engine, tokenizer, tmp_path / out, SilentTerminal()))
        return result, engine

    return asking


def right_twice(text, request):
    """Of three samples the last is wrong; question 3 is answered too late."""
    number = int(text.split("|>")[1].split(" ")[0])
    return "forty-four" if number == 3 else str(2 * number + request.request_id.endswith("/2"))


def test_every_kind_of_task_becomes_values_per_question(ask, tmp_path):
    result, engine = ask(right_twice)
    free, choice, text = (result.tasks[f"sums_{kind}"] for kind in ("free", "choice", "text"))
    assert [question.values for question in free.questions] == [{"right": pytest.approx(2 / 3)}] * 3 + [{"right": 0.0}]
    assert free.questions[1].answers == ["2", "2", "3"]
    assert free.metrics == {"right": pytest.approx(0.5)}
    assert free.estimates["right"].mean == pytest.approx(0.5)
    assert (free.truncated, free.questions[3].truncated) == (0.25, 3)
    assert free.settings["samples"] == 3
    assert free.settings["chat"] is True
    assert len(engine.requests) == 12

    assert choice.truncated is None
    assert choice.settings["chat"] is False
    # A token costs its number: of "2n" and "1" the smaller digit wins, and the shorter text.
    assert [question.values["acc"] for question in choice.questions] == [1.0, 0.0, 0.0, 0.0]

    costs = [sum(token_ids(engine, f"{number} + {number}?")) / 100 for number in range(4)]
    per_byte = [question.values["byte_perplexity"] for question in text.questions]
    assert per_byte == pytest.approx([cost / 6 for cost in costs])
    assert text.metrics["byte_perplexity"] == pytest.approx(math.exp(sum(costs) / 24))
    assert text.higher_is_better == {"byte_perplexity": False}

    assert SuiteResult.read(tmp_path / "sums.json") == result
    assert not (tmp_path / "sums.partial.jsonl").exists()


def token_ids(engine, text):
    return engine._tokenizer.encode(text, add_special_tokens=False)


def test_two_runs_agree_question_by_question(ask):
    (first, _), (second, _) = ask(right_twice), ask(right_twice, out="again.json")
    assert first.tasks == second.tasks


def test_examples_before_a_question_are_the_same_each_time(ask):
    prompts = []
    for out in ("one.json", "two.json"):
        _, engine = ask(lambda *_: "4", out=out, examples=2, max_length=200)
        prompts.append([request.token_ids.tolist() for request in engine.requests])
    assert prompts[0] == prompts[1]
    assert min(map(len, prompts[0])) > 20


def test_prompts_and_questions_have_digests(ask):
    result, _ = ask(right_twice)
    questions = [question for task in result.tasks.values() for question in task.questions]
    assert len({question.prompt for question in questions}) == 12
    assert len({question.data for question in questions}) == 4


def test_at_temperature_0_each_is_asked_once_and_a_limit_takes_the_first(ask):
    result, engine = ask(right_twice, temperature=0.0, limit=2)
    assert {request.temperature for request in engine.requests} == {0.0}
    assert [question.answers for question in result.tasks["sums_free"].questions] == [["0"], ["2"]]
    assert result.tasks["sums_free"].settings["generation"]["temperature"] == 0.0


def test_after_an_interruption_only_the_rest_is_asked(ask, tmp_path, monkeypatch):
    monkeypatch.setattr("evals.model._WAVE", 3)

    def failing(text, request):
        if "|>2" in text:
            raise OSError("the engine went away")
        return right_twice(text, request)

    with pytest.raises(OSError, match="went away"):
        ask(failing)
    assert (tmp_path / "sums.partial.jsonl").exists()
    unbroken, _ = ask(right_twice, out="other.json")
    result, engine = ask(right_twice)
    assert {request.request_id.rpartition("/")[0] for request in engine.requests} == {"sums_free/2", "sums_free/3"}
    assert result.tasks == unbroken.tasks


def test_other_weights_take_no_answer(ask, tmp_path, monkeypatch):
    monkeypatch.setattr("evals.model._WAVE", 3)
    with pytest.raises(ZeroDivisionError):
        ask(lambda text, request: str(1 // (int(text.split("|>")[1][0]) < 3)))
    assert len((tmp_path / "sums.partial.jsonl").read_bytes().splitlines()) == 9
    result, engine = ask(right_twice, digest="other weights")
    assert len(engine.requests) == 12
    assert result.version.digest == "other weights"


def test_a_result_that_cannot_be_written_is_an_error(ask, tmp_path):
    (tmp_path / "occupied").write_text("")
    with pytest.raises(FileExistsError):
        ask(right_twice, out="occupied/sums.json")


def test_a_cancellation_ends_the_wave_and_the_thread(tmp_path, tiny_folder):
    """The engine is idle afterwards: what is generated next finds nothing in flight."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    ended = []

    class Waiting:
        served_version = 0

        async def wave(self, requests):
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(len(requests))

    async def run():
        asked = Asked(model="tiny", version=Version(number=0, digest="w"), step=0, settings={}, limit=0,
                      temperature=1.0, max_length=64)
        engine = OnLoop(Waiting(), asyncio.get_running_loop(), 60.0)
        working = asyncio.ensure_future(evaluate_suite(sums_suite(tmp_path), asked, engine, tokenizer,
                                                       tmp_path / "sums.json", SilentTerminal()))
        await started.wait()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working

    started = asyncio.Event()
    clock.run(run())
    assert ended == [12]
    assert not (tmp_path / "sums.json").exists()


def test_tokens_of_another_version_are_no_answer_of_this_one():
    """By the label of every span, whoever moved the engine on."""
    generator = FakeGenerator(version=3)
    request = SegmentRequest(request_id="one", token_ids=np.asarray([1], np.int32), max_new_tokens=4, temperature=1.0,
                             seed=0)

    async def run():
        engine = OnLoop(generator, asyncio.get_running_loop(), 60.0)
        assert len(await asyncio.to_thread(engine.generate, [request])) == 1
        generator.set_version(4)
        with pytest.raises(GenerationError, match=r"version 3 got tokens of \[4\]"):
            await asyncio.to_thread(engine.generate, [request])

    clock.run(run())
