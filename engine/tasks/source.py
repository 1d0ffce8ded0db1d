"""The tasks of a run: every [[tasks]] entry mixed by weight, minus the questions that are held out."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from engine.config import TaskSection
from engine.errors import ConfigError, DataError
from engine.seeds import derive_seed
from engine.tasks.chats import Chats
from engine.tasks.hub import Hub
from engine.tasks.jsonl import JsonLines
from engine.tasks.question import Environment, Question
from engine.tasks.reasoning_gym import ReasoningGym
from engine.types import Message, Task

# A training list in which this many questions in a row are held out has nothing else.
_MAX_SKIPPED = 10_000


class Cursor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the stream stands, by label: the next index, and the credit by which the mixture chooses."""

    next_index: dict[str, int]
    credit: dict[str, float]


class TaskSource:
    """An endless, resumable stream of training tasks, and the questions held out of it.

    The mixture is a smooth weighted round robin: after any number of tasks each entry's share is within one task or
    so of its weight. A question held out by one entry is trained on by none.

    Raises:
        ConfigError: an environment's name or parameters are wrong.
        DataError: a file is unusable, or there are too few distinct questions to hold out as many as asked for.
    """

    def __init__(self, sections: Sequence[TaskSection], seed: int, reserved: Collection[str] = ()) -> None:
        self._seed = seed
        self._sections = {section.label: section for section in sections}
        self._environments = {
            section.label: _environment(section, f"tasks.{index}") for index, section in enumerate(sections)
        }
        self._held_out = {
            section.label: _hold_out(self._environments[section.label], section.held_out, f"tasks.{index}.held_out",
                                     frozenset(reserved))
            for index, section in enumerate(sections)
        }
        held_out = {question.text for held in self._held_out.values() for question in held}
        self._not_trained = held_out.union(reserved)
        self._total_weight = sum(section.weight for section in sections)
        self._next_index = dict.fromkeys(self._sections, 0)
        self._credit = dict.fromkeys(self._sections, 0.0)

    def next(self) -> Task:
        """The next training task."""
        for label, section in self._sections.items():
            self._credit[label] += section.weight
        label = max(self._credit, key=self._credit.__getitem__)
        self._credit[label] -= self._total_weight
        for index in range(self._next_index[label], self._next_index[label] + _MAX_SKIPPED):
            question = self._environments[label].train(index)
            if question.text not in self._not_trained:
                self._next_index[label] = index + 1
                return self._task(label, question, f"{label}/{index}", index, derive_seed(self._seed, label, index))
        raise DataError(f"task {label!r}: {_MAX_SKIPPED} questions in a row are held out or an evaluation suite's",
                        remedy="lower held_out, or let the environment make more questions")

    def held_out(self, limit: int = 0) -> list[Task]:
        """The held-out questions of every entry, the first `limit` of each; 0: all."""
        return [
            self._task(
                label,
                question,
                f"{label}/held_out/{index}",
                index,
                derive_seed(self._seed, label, "held_out", index),
            )
            for label, held in self._held_out.items()
            for index, question in enumerate(held[: limit or None])
        ]

    def cursor(self) -> dict[str, Any]:
        """Where the stream stands, as JSON-able data for a checkpoint."""
        return msgspec.to_builtins(Cursor(dict(self._next_index), dict(self._credit)))

    def restore(self, cursor: dict[str, Any]) -> None:
        """Go on where `cursor` was taken: the same tasks follow.

        Raises:
            DataError: it was taken with other [[tasks]] entries.
        """
        taken = msgspec.convert(cursor, Cursor)
        if taken.next_index.keys() != self._sections.keys():
            raise DataError(
                f"the checkpoint's tasks are {', '.join(taken.next_index)}; "
                f"the configuration's are {', '.join(self._sections)}",
                remedy="keep the [[tasks]] entries of the run, or start a new one with run.resume = 'never'",
            )
        self._next_index = dict(taken.next_index)
        self._credit = dict(taken.credit)

    def _task(self, label: str, question: Question, task_id: str, index: int, seed: int) -> Task:
        prompt = self._sections[label].system_prompt
        first = (Message("system", prompt),) if prompt else ()
        return Task(
            task_id=task_id,
            env=label,
            index=index,
            messages=(*first, *question.messages),
            answer=question.answer,
            seed=seed,
        )


def _environment(section: TaskSection, path: str) -> Environment:
    match section.env:
        case "reasoning_gym":
            return ReasoningGym(section, path)
        case "jsonl":
            return JsonLines(section, path)
        case "chats":
            return Chats(section, path)
        case "hub":
            return Hub(section, path)
        case _:
            return _own_class(section.env, f"{path}.env")(section)


def _own_class(name: str, path: str) -> Callable[[TaskSection], Environment]:
    """The user's environment at the dotted path `name`."""
    limit = "is no environment"
    try:
        if re.fullmatch(r"\w[\w.]*:\w+", name):
            module, _, attribute = name.partition(":")
            return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        limit = f"cannot be imported: {error}"
    own = "module:Class of your own, in a module beside launch.py, in the current folder or on the PYTHONPATH"
    raise ConfigError(path, value=name, limit=limit, remedy=f"use reasoning_gym, jsonl, hub, chats, or {own}")


def _hold_out(environment: Environment, count: int, path: str, reserved: frozenset[str]) -> list[Question]:
    """The first `count` distinct candidates outside `reserved`, if at least as many distinct ones are left to train
    on."""
    if not count:
        return []
    found: dict[str, Question] = {}
    seen: set[str] = set()
    repeats = 0
    for question in environment.candidates():
        repeats = repeats + 1 if question.text in seen else 0
        seen.add(question.text)
        if question.text not in reserved:
            found.setdefault(question.text, question)
        if len(found) == 2 * count:
            return list(found.values())[:count]
        # Were one more question to be had, e^-10 is the chance that this many draws would all miss it.
        if repeats > 100 + 10 * len(seen):
            break
    raise DataError(
        f"{path} = {count}: the environment has only {len(found)} distinct questions"
        f"{' outside the evaluation suites' if len(found) < len(seen) else ''}, and at least as many must be left to "
        "train on as are held out",
        remedy=f"set it to at most {len(found) // 2}, or let the environment make more questions",
    )
