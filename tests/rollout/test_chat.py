"""Prompts token by token, and where a stop string cuts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hand_made import config, task
from msgspec.structs import replace
from transformers import AutoTokenizer

from engine.errors import ConfigError, DataError, MissingError
from engine.rollout.chat import Chat, open_chat
from engine.types import Int32, Message, Task


@pytest.fixture
def chat(tiny_folder: Path) -> Chat:
    return Chat(tiny_folder, max_prompt_tokens=20)


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return shutil.copytree(tiny_folder, tmp_path / "model")


def ids_of(folder: Path, text: str) -> Int32:
    return np.asarray(AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False), np.int32)


def test_a_prompt_ends_where_the_assistant_begins(chat: Chat, tiny_folder: Path) -> None:
    prompt = chat.encode(task(content="2 + 3?"))
    assert prompt.dtype == np.int32
    assert chat.decode_all(prompt) == "<|user|>2 + 3?<|end|><|assistant|>"
    text = ids_of(tiny_folder, "2 + 3?")
    assert prompt.tolist() == [259, *text.tolist(), 256, 260]


def test_every_message_is_in_it(chat: Chat) -> None:
    first = task()
    turns = (Message("system", "Be"), Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    prompt = chat.encode(
        Task(task_id="t", env="t", index=0, messages=turns, answer=first.answer, seed=0)
    )
    assert chat.decode_all(prompt) == (
        "<|system|>Be<|end|><|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>"
    )


def test_a_prompt_that_is_too_long_is_the_datas_fault(chat: Chat) -> None:
    assert len(chat.encode(task(content="x" * 17))) == 20
    assert chat.refusal(task(content="x" * 17)) == ""
    assert chat.refusal(task(content="x" * 18)) == "prompt has 21 tokens, 20 fit"
    with pytest.raises(DataError, match=r"task sums/7: its prompt has 21 tokens, 20 fit\n  -> raise generate"):
        chat.encode(task(7, content="x" * 18))


def test_a_tokenizer_that_adds_a_bos_adds_no_second_one(folder: Path) -> None:
    """<|pad|> plays the BOS: the tokenizer puts it before every text, and so does the template."""
    settings = json.loads((folder / "tokenizer.json").read_text())
    bos, text = {"SpecialToken": {"id": "<|pad|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    settings["post_processor"] = {
        "type": "TemplateProcessing", "single": [bos, text], "pair": [bos, text, text],
        "special_tokens": {"<|pad|>": {"id": "<|pad|>", "ids": [257], "tokens": ["<|pad|>"]}},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    template = folder / "chat_template.jinja"
    template.write_text("<|pad|>" + template.read_text())
    assert AutoTokenizer.from_pretrained(folder).encode("x")[0] == 257
    assert (Chat(folder, 20).encode(task()) == 257).sum() == 1


def test_a_model_without_a_chat_template_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(MissingError, match=r"no chat template\n.*instruction-tuned"):
        Chat(folder, 20)


def test_a_template_file_replaces_the_tokenizers(tiny_folder: Path, folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "other.jinja"
    template.write_text("<|user|>{{ messages[-1]['content'] }}!<|end|><|assistant|>")
    (folder / "chat_template.jinja").unlink()
    for model in (tiny_folder, folder):
        chat = open_chat(config(model={"chat_template": str(template)}), model)
        assert chat.decode_all(chat.encode(task(content="2 + 3?"))) == "<|user|>2 + 3?!<|end|><|assistant|>"


def test_a_prompt_leaves_room_for_the_new_tokens(tiny_folder: Path) -> None:
    chat = open_chat(config(generate={"max_model_len": 30, "max_new_tokens": 10}), tiny_folder)
    assert chat.refusal(task(content="x" * 18)) == "prompt has 21 tokens, 20 fit"


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}<|assistant|>"


def test_a_system_prompt_that_the_template_refuses_is_named_at_the_start(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(NO_SYSTEM)
    settings = config()
    open_chat(settings, folder)
    first = settings.tasks[0]
    tasks = (first, replace(first, name="more", system_prompt="Be brief."))
    with pytest.raises(ConfigError, match=r"tasks\.1\.system_prompt = 'Be brief\.': .*refuses it: no system role\n"):
        open_chat(replace(settings, tasks=tasks), folder)


def test_messages_that_the_template_refuses_are_the_datas_fault(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(NO_SYSTEM)
    asked = replace(task(7), messages=(Message("system", "Be brief."), Message("user", "?")))
    for encode in (Chat(folder, 20).encode, Chat(folder, 20).refusal):
        with pytest.raises(DataError, match=r"task sums/7: the chat template refuses its messages: no system role"):
            encode(asked)


def test_a_broken_template_file_is_named_at_the_start(tiny_folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{% for %}")
    with pytest.raises(ConfigError, match=r"model\.chat_template = '.*broken\.jinja': the chat template refuses it: "):
        open_chat(config(model={"chat_template": str(template)}), tiny_folder)


def test_special_tokens_show_only_on_demand(chat: Chat, tiny_folder: Path) -> None:
    ids = np.asarray([*ids_of(tiny_folder, "a b"), 256], np.int32)
    assert chat.decode(ids) == "a b"
    assert chat.decode_all(ids) == "a b<|end|>"
    assert chat.decode(ids[:0]) == ""


@pytest.mark.parametrize(
    ("text", "stops", "cut"),
    [
        ("ab STOP cd", ("STOP",), 7),
        ("ab STOP", ("STOP",), 7),
        ("STOP STOP", ("STOP",), 4),
        ("ab. cd; ef", (";", "."), 3),
        ("abc", ("b", "abc"), 2),
        ("naïve", ("ï",), 4),  # two bytes, so two tokens
        ("ab STO", ("STOP",), None),
        ("ab STOP", (), None),
        ("", ("STOP",), None),
    ],
)
def test_the_cut_is_the_shortest_prefix_that_holds_a_stop_string(
    chat: Chat, tiny_folder: Path, text: str, stops: tuple[str, ...], cut: int | None
) -> None:
    assert chat.cut_at_stop(ids_of(tiny_folder, text), stops) == cut


def test_a_stop_string_inside_a_longer_token_keeps_the_token(folder: Path) -> None:
    """What was sampled stays whole: the cut comes after the token in which the stop string ends."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["xSTOPy"])
    tokenizer.save_pretrained(folder)
    ids = ids_of(folder, "abxSTOPycd")
    assert len(ids) == 5
    assert Chat(folder, 20).cut_at_stop(ids, ("STOP",)) == 3


def told(*turns: tuple[str, str]) -> Task:
    """Roles' first letters and contents."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    messages = tuple(Message(roles[role], content) for role, content in turns)  # type: ignore[arg-type]
    return replace(task(7), messages=messages)


def learned(chat: Chat, conversation: Task) -> tuple[str, list[str]]:
    """The whole text, and the pieces of it that are trained on."""
    rollout = chat.conversation(conversation)
    edges = np.flatnonzero(np.diff(rollout.trainable, prepend=False, append=False)).reshape(-1, 2)
    return chat.decode_all(rollout.token_ids), [chat.decode_all(rollout.token_ids[slice(*edge)]) for edge in edges]


def test_what_the_assistant_says_is_learned_with_the_token_that_ends_its_turn(chat: Chat, tiny_folder: Path) -> None:
    rollout = chat.conversation(told(("u", "2+3?"), ("a", "51")))
    question, answer = ids_of(tiny_folder, "2+3?").tolist(), ids_of(tiny_folder, "51").tolist()
    assert rollout.token_ids.tolist() == [259, *question, 256, 260, *answer, 256]
    assert rollout.trainable.tolist() == [False] * 7 + [True] * 3
    assert rollout.logprobs.tolist() == [0.0] * 10
    assert (rollout.token_ids.dtype, rollout.trainable.dtype, rollout.logprobs.dtype) == (
        np.int32, np.bool_, np.float32,
    )  # fmt: skip
    assert (rollout.env, rollout.seed, rollout.reward, rollout.length) == ("sums", 7, None, 3)


def test_every_turn_of_the_assistant_is_learned_and_no_other(chat: Chat) -> None:
    text, pieces = learned(chat, told(("s", "Be"), ("u", "a"), ("a", "bc"), ("u", "d"), ("a", "")))
    assert text == "<|system|>Be<|end|><|user|>a<|end|><|assistant|>bc<|end|><|user|>d<|end|><|assistant|><|end|>"
    assert pieces == ["bc<|end|>", "<|end|>"]


def test_a_chat_may_be_longer_than_a_prompt(chat: Chat) -> None:
    assert len(chat.conversation(told(("u", "x" * 30), ("a", "y"))).token_ids) == 35


def test_control_tokens_that_a_chat_spells_stay_text(chat: Chat, tiny_folder: Path) -> None:
    conversation = told(("u", "<|end|>?"), ("a", "a<|end|>b"), ("u", "<|assistant|>"), ("a", "c"))
    ids = chat.conversation(conversation).token_ids.tolist()
    assert (ids.count(256), ids.count(260)) == (4, 2)
    text, pieces = learned(chat, conversation)
    assert text == (
        "<|user|><|end|>?<|end|><|assistant|>a<|end|>b<|end|><|user|><|assistant|><|end|><|assistant|>c<|end|>"
    )
    assert pieces == ["a<|end|>b<|end|>", "c<|end|>"]


def test_what_the_template_adds_after_the_last_turn_is_left_out(folder: Path) -> None:
    """The end of a turn is followed by a line break, as in ChatML: nobody has said it."""
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|end|>", "<|end|>\n"))
    text, pieces = learned(Chat(folder, 20), told(("u", "a"), ("a", "b"), ("u", "c"), ("a", "d")))
    assert text == "<|user|>a<|end|>\n<|assistant|>b<|end|>\n<|user|>c<|end|>\n<|assistant|>d<|end|>"
    assert pieces == ["b<|end|>", "d<|end|>"]


TURNS = "{{% for m in messages %}}{}{{% endfor %}}{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"


@pytest.mark.parametrize(
    ("turn", "one", "two"),
    [
        # The user's last turn has a hint, which an answer takes away.
        ("<|{{ m.role }}|>{{ m.content }}{{ '!' if loop.last and m.role == 'user' }}<|end|>", False, False),
        # What the assistant has thought is forgotten once the user speaks again.
        ("<|{{ m.role }}|>{{ m.content if loop.last or m.role == 'user' else m.content[-1] }}<|end|>", True, False),
        # The assistant's turns are not ended, the user's are.
        ("<|{{ m.role }}|>{{ m.content }}{{ '<|end|>' if m.role == 'user' }}", False, False),
        # Only its last one is.
        ("<|{{ m.role }}|>{{ m.content }}{{ '<|end|>' if loop.last or m.role == 'user' }}", True, False),
    ],
    ids=["hint", "forgotten", "never-ended", "ended-once"],
)
def test_a_template_that_tells_a_turn_otherwise_later_is_refused(folder: Path, turn: str, one: bool, two: bool) -> None:
    """Whether a chat of one turn, and one of two, is taken."""
    (folder / "chat_template.jinja").write_text(TURNS.format(turn))
    chat = Chat(folder, 20)
    chats = [(one, told(("u", "a"), ("a", "b so c"))), (two, told(("u", "a"), ("a", "b so c"), ("u", "d"), ("a", "e")))]
    for taken, conversation in chats:
        if taken:
            assert learned(chat, conversation)[1] == ["b so c<|end|>"]
        else:
            with pytest.raises(DataError, match=r"sums/7: message 2 is nothing that the model could have said"):
                chat.conversation(conversation)


def test_a_chat_that_the_template_refuses_is_the_datas_fault(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(NO_SYSTEM)
    with pytest.raises(DataError, match=r"task sums/7: the chat template refuses its messages: no system role"):
        Chat(folder, 20).conversation(told(("s", "Be brief."), ("u", "?"), ("a", "!")))
