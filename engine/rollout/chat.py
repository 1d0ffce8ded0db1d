"""Messages to prompt tokens and sampled tokens to text. Sampled tokens are never encoded again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jinja2 import TemplateError
from transformers import AutoTokenizer

from engine.config import Config
from engine.errors import ConfigError, DataError, MissingError
from engine.types import Int32, Message, Rollout, Task

# Noncharacters: they stand in no text, and no template strips them.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


def open_chat(config: Config, folder: Path) -> Chat:
    """The run's chat, for prompts that leave room for `generate.max_new_tokens`.

    Raises:
        ConfigError: `model.chat_template` is broken, or the template takes no system message though an entry has one.
    """
    generate, question = config.generate, Message("user", "?")
    chat = Chat(folder, generate.max_model_len - generate.max_new_tokens, config.model.chat_template)
    trials = [("model.chat_template", config.model.chat_template, (question,))] + [
        (f"tasks.{index}.system_prompt", section.system_prompt, (Message("system", section.system_prompt), question))
        for index, section in enumerate(config.tasks)
        if section.system_prompt
    ]
    for path, value, messages in trials:
        try:
            chat.render(messages)
        except TemplateError as error:
            raise ConfigError(
                path, value=value, limit=f"the chat template refuses it: {error}",
                remedy="mend it, or name another template with model.chat_template",
            ) from error
    return chat


class Chat:
    """The model's tokenizer and its chat template, or the one in the file `template`. Prompts are at most
    `max_prompt_tokens` long."""

    def __init__(self, folder: Path, max_prompt_tokens: int, template: str = "") -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._max_prompt_tokens = max_prompt_tokens
        if template:
            self.tokenizer.chat_template = Path(template).expanduser().read_text()
        if self.tokenizer.chat_template is None:
            raise MissingError(
                f"{folder}: the tokenizer has no chat template",
                remedy="use an instruction-tuned model's folder, or name a template with model.chat_template",
            )
        self._control = {
            number: token.content for number, token in self.tokenizer.added_tokens_decoder.items() if token.special
        }
        longest_first = sorted(self._control.values(), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def encode(self, task: Task) -> Int32:
        """The prompt, int32[T], ending where the assistant's turn begins. The template alone adds special tokens:
        text that spells one stays text.

        Raises:
            DataError: it is longer than `max_prompt_tokens`, or the template refuses the messages.
        """
        ids = self._prompt(task)
        if too_long := self._too_long(ids):
            raise DataError(
                f"task {task.task_id}: its {too_long}",
                remedy="raise generate.max_model_len, or lower generate.max_new_tokens",
            )
        return np.asarray(ids, np.int32)

    def refusal(self, task: Task) -> str:
        """Why no rollout of the task can be made, or empty: "prompt has 600 tokens, 512 fit"."""
        return self._too_long(self._prompt(task))

    def conversation(self, task: Task) -> Rollout:
        """A chat that ends with the assistant's turn, as if sampled: trainable is what the assistant says in any of its
        turns, the token that ends the turn included.

        Raises:
            DataError: the template refuses the messages, tells an earlier turn otherwise once another follows, or ends
                a turn without the tokenizer's EOS.
        """
        ids, eos = self._ids(task, task.messages, answering=False), self.tokenizer.eos_token_id
        said = np.zeros(len(ids), np.bool_)
        end = 0
        for index, message in enumerate(task.messages):
            if message.role != "assistant":
                continue
            before = self._ids(task, task.messages[:index], answering=True)
            turn = self._ids(task, task.messages[: index + 1], answering=False)
            start = len(before)
            end = turn.index(eos, start) + 1 if eos in turn[start:] else 0
            if not end or turn[:start] != before or ids[:end] != turn[:end]:
                raise DataError(
                    f"task {task.task_id}: message {index + 1} is nothing that the model could have said: the chat "
                    "template tells it or what stands before it otherwise, or does not end it with the tokenizer's EOS",
                    remedy="name another template with model.chat_template, or leave earlier turns out",
                )
            said[start:end] = True
        return Rollout(
            token_ids=np.asarray(ids[:end], np.int32), trainable=said[:end], logprobs=np.zeros(end, np.float32),
            version_spans=(), stop_reason="stop", env=task.env, lease_id=task.task_id, index_in_group=0, seed=task.seed,
        )

    def render(self, messages: Sequence[Message], *, answering: bool = True) -> str:
        """The chat as text, up to where the assistant begins its turn if it is `answering`.

        Raises:
            TemplateError: the template refuses the messages.
        """
        turns = [{"role": message.role, "content": message.content} for message in messages]
        return self.tokenizer.apply_chat_template(turns, add_generation_prompt=answering, tokenize=False)

    def _prompt(self, task: Task) -> list[int]:
        return self._ids(task, task.messages, answering=True)

    def _ids(self, task: Task, messages: Sequence[Message], *, answering: bool) -> list[int]:
        try:
            if not any(self._spelled.search(message.content) for message in messages):
                return self.tokenizer.encode(self.render(messages, answering=answering), add_special_tokens=False)
            return self._ids_around(messages, answering)
        except TemplateError as error:
            raise DataError(
                f"task {task.task_id}: the chat template refuses its messages: {error}",
                remedy="mend the messages, or name another template with model.chat_template",
            ) from error

    def _ids_around(self, messages: Sequence[Message], answering: bool) -> list[int]:
        """The template is rendered with a mark for every control token that the text spells; what stands between the
        marks is encoded as always, and the spelled token without its meaning."""
        # A hash of the contents stands in none of them.
        mark = _OPEN + hashlib.sha256("".join(message.content for message in messages).encode()).hexdigest()
        numbers = {text: number for number, text in self._control.items()}
        marked = [
            Message(message.role, self._spelled.sub(lambda at: f"{mark}{numbers[at[0]]}{_CLOSE}", message.content))
            for message in messages
        ]
        rendered = self.render(marked, answering=answering)
        ids: list[int] = []
        for place, piece in enumerate(re.split(f"{mark}(\\d+){_CLOSE}", rendered)):
            text, spelled = (self._control[int(piece)], True) if place % 2 else (piece, False)
            ids += self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=spelled)
        return ids

    def _too_long(self, ids: Sequence[int]) -> str:
        fit = self._max_prompt_tokens
        return f"prompt has {len(ids)} tokens, {fit} fit" if len(ids) > fit else ""

    def decode(self, token_ids: Int32) -> str:
        """Text of sampled tokens without special tokens."""
        return self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)

    def decode_all(self, token_ids: Int32) -> str:
        """Text with special tokens shown, as the model sees it."""
        return self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)

    def cut_at_stop(self, token_ids: Int32, stops: Sequence[str]) -> int | None:
        """Length of the shortest prefix whose text holds a stop string, or None: also one that spans segments."""

        def holds(count: int) -> bool:
            text = self.decode(token_ids[:count])
            return any(stop in text for stop in stops)

        if not stops or not holds(len(token_ids)):
            return None
        low, high = 1, len(token_ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle + 1, high)
        return low

