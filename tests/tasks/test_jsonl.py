from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config import TaskSection
from engine.errors import ConfigError, DataError
from engine.tasks.jsonl import JsonLines
from engine.types import Message

GOOD = '{"messages": [{"role": "user", "content": "2 + 3?"}], "answer": "5"}'


def load(tmp_path: Path, content: bytes | str, **settings: object) -> JsonLines:
    file = tmp_path / "data.jsonl"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    params = {"path": str(file)} | ({"score": settings.pop("score")} if "score" in settings else {})
    return JsonLines(TaskSection(env="jsonl", params=params, **settings), "tasks.0")  # type: ignore[arg-type]


def line(messages: object, answer: object = "5") -> str:
    return json.dumps({"messages": messages, "answer": answer})


def user(content: object = "2 + 3?") -> dict[str, object]:
    return {"role": "user", "content": content}


def test_a_line_becomes_a_question(tmp_path: Path) -> None:
    question = load(tmp_path, GOOD).train(0)
    assert question.messages == (Message("user", "2 + 3?"),)
    assert question.answer == {"answer": "5"}


def test_blank_lines_windows_endings_and_a_byte_order_mark_are_fine(tmp_path: Path) -> None:
    environment = load(tmp_path, b"\xef\xbb\xbf" + f"{GOOD}\r\n\r\n  \n{GOOD}\n\n".encode())
    assert len({environment.train(i).text for i in range(2)}) == 1


@pytest.mark.parametrize(("answer", "gold"), [(5, "5"), (1.5, "1.5"), ("five", "five")])
def test_answers_are_text(tmp_path: Path, answer: object, gold: str) -> None:
    assert load(tmp_path, line([user()], answer)).train(0).answer == {"answer": gold}


@pytest.mark.parametrize("score", ["my_rewards:passes", {"my_rewards:passes": 1.0, "length": 0.1}, "judge"])
def test_a_scorer_that_does_not_compare_it_gets_the_answer_as_it_is(tmp_path: Path, score: object) -> None:
    answer = {"tests": ["f(1) == 2"]}
    environment = load(tmp_path, line([user()], answer), score=score)
    assert environment.train(0).answer == {"answer": answer}


@pytest.mark.parametrize("score", ["math", {"my_rewards:passes": 1.0, "exact": 1.0}])
def test_one_that_compares_it_gets_text(tmp_path: Path, score: object) -> None:
    assert load(tmp_path, line([user()], 5), score=score).train(0).answer == {"answer": "5"}
    with pytest.raises(DataError, match="is neither text nor a number"):
        load(tmp_path, line([user()], {"tests": []}), score=score)


def test_the_judge_may_be_set_up() -> None:
    JsonLines(TaskSection(env="jsonl", params={"path": "configs/smoke_tasks.jsonl", "judge": {}}), "tasks.0")


@pytest.mark.parametrize("score", ["my_rewards:passes", "judge"])
def test_a_scorer_that_compares_nothing_needs_no_answer(tmp_path: Path, score: str) -> None:
    environment = load(tmp_path, json.dumps({"messages": [user()]}), score=score)
    assert environment.train(0).answer == {"answer": None}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"messages": [', "truncated"),
        ("not json", "malformed"),
        ("[1, 2]", "Expected `object`, got `array`"),
        ('{"messages": [{"role": "user", "content": "?"}]}', "answer None is neither text nor a number"),
        ('{"answer": "5"}', "missing required field `messages`"),
        (line("2 + 3?"), "Expected `array`, got `str`"),
        (line([{"role": "user"}]), "missing required field `content`"),
        (line([user(5)]), "Expected `str`, got `int`"),
        (line([{"role": "tool", "content": "?"}]), "Invalid enum value 'tool'"),
        (line([]), "the last message is not the user's"),
        (line([user(), {"role": "assistant", "content": "5"}]), "the last message is not the user's"),
        (line([user(), {"role": "system", "content": "Be brief."}, user()]), "a system message is not the first"),
        (line([user()], None), "answer None is neither text nor a number"),
        (line([user()], ["5"]), r"answer \['5'\] is neither text nor a number"),
        (line([user()], True), "answer True is neither"),
        (line([user()], " "), "answer ' ' is neither"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path, f"{GOOD}\n\n{bad}\n{GOOD}")
    assert f"{tmp_path / 'data.jsonl'}:3: " in str(caught.value)
    assert "\n  -> " in str(caught.value)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_wrong_encoding_is_named(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(DataError, match=r"data\.jsonl:1: is not UTF-8"):
        load(tmp_path, '{"messages": [{"role": "user", "content": "caf\u00e9?"}], "answer": "5"}'.encode(encoding))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(DataError, match="holds no line"):
        load(tmp_path, content)


def test_two_system_messages_are_refused(tmp_path: Path) -> None:
    content = line([{"role": "system", "content": "Be brief."}, user()])
    load(tmp_path, content)
    with pytest.raises(DataError, match=r"data\.jsonl:1: has a system message beside"):
        load(tmp_path, content, system_prompt="Be long.")


def test_an_unknown_param_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.2\.params\.shuffle = True"):
        JsonLines(TaskSection(env="jsonl", params={"path": "x", "shuffle": True}), "tasks.2")


def test_every_epoch_is_another_order_of_the_same_questions(tmp_path: Path) -> None:
    content = "\n".join(line([user(f"question {i}")]) for i in range(20))
    environment = load(tmp_path, content, seed=4)
    epochs = [[environment.train(epoch * 20 + i).text for i in range(20)] for epoch in range(3)]

    assert all(sorted(epoch) == sorted(f"question {i}" for i in range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [environment.train(i).text for i in range(20)] == epochs[0]
    assert [load(tmp_path, content, seed=5).train(i).text for i in range(20)] != epochs[0]
