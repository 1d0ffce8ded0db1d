"""What a worker does with one completion, and the messages about it. Imports neither torch nor numpy."""

from __future__ import annotations

import difflib
import importlib
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import Any

import msgspec

from engine.errors import ConfigError
from engine.reward import family, judge, symbolic
from engine.reward.answer import Kind, extract, same_answer

_NAMED = ("exact", "math", "letters", "length", "overlong", "judge")
_DOTTED = re.compile(r"\w[\w.]*:\w+")
HEADER_BYTES = 4
# DAPO's soft overlong punishment begins at this share of the limit.
_LONG = 0.8

Custom = Callable[[str, dict[str, Any]], float]
# The extracted answer -> a value, or None where the scorer gives no verdict.
Scorer = Callable[[str | None], float | None]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to score. `weights` is scorer -> weight; `question` the last message of the prompt."""

    weights: dict[str, float]
    kind: Kind
    question: str
    completion: str
    answer: dict[str, Any]
    num_tokens: int
    max_new_tokens: int
    judge: judge.Settings | None = None


class Started(msgspec.Struct, frozen=True, tag=True):
    """All that the scorers need is imported: their time runs from now."""


class Judgement(msgspec.Struct, frozen=True, tag=True):
    """The scorers' word: the weighted sum of `parts`, which hold each one's own value. Null: one gave no verdict."""

    reward: float | None
    extracted: str | None
    parts: dict[str, float]


class Failure(msgspec.Struct, frozen=True, tag=True):
    """A scorer raised."""

    traceback: str
    remedy: str = "mend the reward function at the place that its traceback names"


Reply = Started | Judgement | Failure


def frame(message: Job | Reply) -> bytes:
    """`message` as it crosses a pipe: length, then msgpack."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(HEADER_BYTES, "little") + data


def require_scorers(weights: Mapping[str, object], path: str) -> None:
    """Refuse, before the run starts, what no worker could compute. Imports the modules of dotted paths.

    Raises:
        ConfigError: there is no scorer, a name is neither a named scorer nor a function's dotted path, or a weight is
            no finite number.
    """
    if not weights:
        raise ConfigError(path, value=weights, limit="names no scorer", remedy=f"use {', '.join(_NAMED)}, or your own")
    for name, weight in weights.items():
        _require_scorer(name, path)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ConfigError(f"{path}.{name}", value=weight, limit="is no weight", remedy="write a number")


def _require_scorer(name: str, path: str) -> None:
    if name in _NAMED:
        return
    limit = "is no scorer"
    try:
        if _DOTTED.fullmatch(name) and callable(_resolve(name)):
            return
    except (ImportError, AttributeError) as error:
        limit = str(error)
    near = difflib.get_close_matches(name, _NAMED)
    own = "module:function of your own, in a module beside launch.py, in the current folder or on the PYTHONPATH"
    remedy = f"did you mean {near[0]}?" if near else f"use {', '.join(_NAMED)}, or {own}"
    raise ConfigError(path, value=name, limit=limit, remedy=remedy)


def prepare(job: Job) -> Callable[[], Judgement]:
    """Import what scoring `job` needs; what is returned scores it."""
    return partial(_judgement, job, {name: _scorer(name, job) for name in job.weights})


def _judgement(job: Job, scorers: dict[str, Scorer]) -> Judgement:
    extracted = extract(job.completion, job.kind)
    values = {name: scorer(extracted) for name, scorer in scorers.items()}
    parts = {name: value for name, value in values.items() if value is not None}
    if len(parts) < len(values):
        return Judgement(None, extracted, parts | {"unjudged": 1.0})
    return Judgement(sum(job.weights[name] * value for name, value in parts.items()), extracted, parts)


def _scorer(name: str, job: Job) -> Scorer:
    match name:
        case "exact":
            return partial(_exact, job, family.load(job.answer) if "entry" in job.answer else None)
        case "math":
            return partial(_math, job, symbolic.load())
        case "letters":
            return partial(_letters, job)
        case "length":
            return partial(_length, job)
        case "overlong":
            return partial(_overlong, job)
        case "judge":
            assert job.judge is not None
            return partial(judge.verdict, job.judge, _texts(job))
        case _:
            return partial(_custom, job, name, _resolve(name))


def _resolve(name: str) -> Custom:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _texts(job: Job) -> dict[str, str]:
    spoken = extract(job.completion, "exact") or ""
    return {"question": job.question, "completion": spoken, "answer": str(job.answer["answer"])}


def _exact(job: Job, accepts: family.Accepts | None, extracted: str | None) -> float:
    """1 for the right answer, else 0."""
    gold = job.answer["answer"]
    right = extracted is not None and (
        (gold is not None and same_answer(extracted, gold)) or (accepts is not None and accepts(extracted))
    )
    return float(right)


def _math(job: Job, same: symbolic.SameMeaning, extracted: str | None) -> float:
    """1 for what means the same as the right answer, else 0."""
    gold = job.answer["answer"]
    return float(extracted is not None and gold is not None and same(extracted, gold))


def _letters(job: Job, extracted: str | None) -> float:
    """The share of characters that the answer has too: dense enough for an untrained model to learn from."""
    wanted = set(job.answer["answer"])
    return sum(letter in wanted for letter in job.completion) / max(len(job.completion), 1)


def _length(job: Job, extracted: str | None) -> float:
    """0 for no token, -1 at the limit."""
    return -job.num_tokens / job.max_new_tokens


def _overlong(job: Job, extracted: str | None) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476): 0 up to 80 % of the limit, then linearly to -1."""
    room = job.max_new_tokens * (1 - _LONG)
    return -min(max(job.num_tokens - job.max_new_tokens * _LONG, 0.0) / room, 1.0)


def _custom(job: Job, name: str, score: Custom, extracted: str | None) -> float:
    """The user's own reward."""
    value = score(job.completion, job.answer)
    # numpy's numbers are Reals too.
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} returned {value!r}: a reward is a finite number")
    return float(value)
