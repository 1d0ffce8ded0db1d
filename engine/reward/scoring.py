"""What a worker does with one completion, and the messages about it. Imports neither torch nor numpy."""

from __future__ import annotations

import difflib
import importlib
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from engine.errors import ConfigError
from engine.reward import family
from engine.reward.answer import Kind, extract, same_answer

_NAMED = ("exact", "letters")
_DOTTED = re.compile(r"\w[\w.]*:\w+")
HEADER_BYTES = 4

Custom = Callable[[str, dict[str, Any]], float]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to score."""

    scorer: str
    kind: Kind
    completion: str
    answer: dict[str, Any]


class Started(msgspec.Struct, frozen=True, tag=True):
    """All that the scorer needs is imported: its time runs from now."""


class Judgement(msgspec.Struct, frozen=True, tag=True):
    """The scorer's word."""

    reward: float
    extracted: str | None
    parts: dict[str, float]


class Failure(msgspec.Struct, frozen=True, tag=True):
    """The scorer raised."""

    traceback: str


Reply = Started | Judgement | Failure


def frame(message: Job | Reply) -> bytes:
    """`message` as it crosses a pipe: length, then msgpack."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(HEADER_BYTES, "little") + data


def require_scorer(name: object, path: str) -> None:
    """Refuse, before the run starts, a scorer that no worker could find. Imports the module of a dotted path.

    Raises:
        ConfigError: `name` is neither a named scorer nor the dotted path of a function.
    """
    if name in _NAMED:
        return
    limit = "is no scorer"
    try:
        if isinstance(name, str) and _DOTTED.fullmatch(name) and callable(_resolve(name)):
            return
    except (ImportError, AttributeError) as error:
        limit = str(error)
    near = difflib.get_close_matches(str(name), _NAMED)
    remedy = f"did you mean {near[0]}?" if near else f"use {', '.join(_NAMED)}, or module:function of your own"
    raise ConfigError(path, value=name, limit=limit, remedy=remedy)


def prepare(job: Job) -> Callable[[], Judgement]:
    """Import what scoring `job` needs; what is returned scores it."""
    match job.scorer:
        case "exact":
            return partial(_exact, job, family.load(job.answer) if "entry" in job.answer else None)
        case "letters":
            return partial(_letters, job)
        case name:
            return partial(_custom, job, _resolve(name))


def _resolve(name: str) -> Custom:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _exact(job: Job, accepts: family.Accepts | None) -> Judgement:
    """1 for the right answer, else 0."""
    extracted = extract(job.completion, job.kind)
    gold = job.answer["answer"]
    right = extracted is not None and (
        (gold is not None and same_answer(extracted, gold)) or (accepts is not None and accepts(extracted))
    )
    return Judgement(float(right), extracted, {"exact": float(right)})


def _letters(job: Job) -> Judgement:
    """The share of characters that the answer has too: dense enough for an untrained model to learn from."""
    wanted = set(job.answer["answer"])
    share = sum(letter in wanted for letter in job.completion) / max(len(job.completion), 1)
    return Judgement(share, extract(job.completion, job.kind), {"letters": share})


def _custom(job: Job, score: Custom) -> Judgement:
    """The user's own reward."""
    reward = float(score(job.completion, job.answer))
    if not math.isfinite(reward):
        raise ValueError(f"{job.scorer} returned {reward}: a reward must be finite")
    return Judgement(reward, extract(job.completion, job.kind), {job.scorer.partition(":")[2]: reward})
