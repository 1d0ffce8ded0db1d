from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config import TaskSection
from engine.errors import ConfigError, DataError
from engine.tasks.chats import Chats
from engine.types import Message

USER, SAID = {"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}
SYSTEM = {"role": "system", "content": "Be brief."}
GOOD = json.dumps({"messages": [USER, SAID]})


def load(tmp_path: Path, content: bytes | str, *, seed: int = 0, system_prompt: str = "") -> Chats:
    file = tmp_path / "chats.jsonl"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    section = TaskSection(env="chats", params={"path": str(file)}, seed=seed, system_prompt=system_prompt)
    return Chats(section, "tasks.0")


def line(*messages: dict[str, str]) -> str:
    return json.dumps({"messages": messages})


def test_a_line_becomes_a_chat_without_an_answer(tmp_path: Path) -> None:
    chat = load(tmp_path, line(SYSTEM, USER, SAID, USER, SAID)).train(0)
    turn = (Message("user", "2 + 3?"), Message("assistant", "5"))
    assert chat.messages == (Message("system", "Be brief."), *turn, *turn)
    assert chat.answer == {}


def test_blank_lines_windows_endings_and_a_byte_order_mark_are_fine(tmp_path: Path) -> None:
    other = line(USER, SAID, USER, SAID)
    chats = load(tmp_path, b"\xef\xbb\xbf" + f"{GOOD}\r\n\r\n  \n{other}\n\n".encode())
    assert sorted(len(chats.train(index).messages) for index in range(4)) == [2, 2, 4, 4]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"messages": [', "truncated"),
        ("[1]", "Expected `object`, got `array`"),
        ('{"message": []}', "missing required field `messages`"),
        ('{"messages": [{"role": "tool", "content": "?"}]}', "Invalid enum value 'tool'"),
        (line(), "the last message is not the assistant's"),
        (line(USER), "the last message is not the assistant's"),
        (line(USER, SAID, USER), "the last message is not the assistant's"),
        (line(USER, SYSTEM, SAID), "a system message is not the first"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path, f"{GOOD}\n\n{bad}\n{GOOD}")
    assert f"{tmp_path / 'chats.jsonl'}:3: " in str(caught.value)
    assert "\n  -> " in str(caught.value)


def test_a_wrong_encoding_is_named(tmp_path: Path) -> None:
    content = GOOD.replace("2 + 3?", "caf\u00e9?").encode("latin-1")
    with pytest.raises(DataError, match=r"chats\.jsonl:2: is not UTF-8"):
        load(tmp_path, GOOD.encode() + b"\n" + content)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(DataError, match="holds no line"):
        load(tmp_path, content)


def test_two_system_messages_are_refused(tmp_path: Path) -> None:
    load(tmp_path, GOOD, system_prompt="Be long.")
    load(tmp_path, line(SYSTEM, USER, SAID))
    with pytest.raises(DataError, match=r"chats\.jsonl:1: has a system message beside"):
        load(tmp_path, line(SYSTEM, USER, SAID), system_prompt="Be long.")


def test_another_param_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.2\.params\.score = 'exact': is no key of chats\n"):
        Chats(TaskSection(env="chats", params={"path": "x", "score": "exact"}), "tasks.2")


def test_every_epoch_is_another_order_of_the_same_chats(tmp_path: Path) -> None:
    content = "\n".join(line({"role": "user", "content": f"{number}?"}, SAID) for number in range(20))
    chats = load(tmp_path, content, seed=4)
    epochs = [[chats.train(20 * epoch + index).messages[0].content for index in range(20)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(f"{number}?" for number in range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
