"""One suite on one model: lm-eval asks, `evals/model.py` answers, and what comes out becomes a `SuiteResult`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import lm_eval.api.task
import msgspec
import numpy as np
import torch
from lm_eval.evaluator import evaluate
from msgspec.structs import replace

from engine.config import Config
from engine.observe.estimate import Estimate, estimate
from engine.observe.terminal import Terminal
from engine.types import Version
from evals.answers import AnswerFile
from evals.model import Engine, EngineLM
from evals.result import UNITS, Question, SuiteResult, TaskResult
from evals.suites import Suite


def _silently(documents: Any, **_: Any) -> Any:
    return documents


# lm-eval 0.4.13 shows the milliseconds in which it makes prompts as progress, over whatever the terminal shows.
lm_eval.api.task.tqdm = _silently
# As lm-eval's own command: which examples stand before a question must not change from one evaluation to the next.
_EXAMPLES_SEED = 1234


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What is evaluated, and how. `settings` is everything that an answer depends on beside weights and request; `step`
    is null outside a run."""

    model: str
    version: Version
    step: int | None
    settings: dict[str, str]
    limit: int
    temperature: float
    max_length: int


def settings_of(config: Config, tokenizer: Any, backend: str) -> dict[str, str]:
    """What holds for every task of an evaluation."""
    return {
        "backend": backend,
        "dtype": config.engine_dtype,
        "lm_head_dtype": config.model.lm_head_dtype,
        "chat_template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16],
        "lm_eval": importlib.metadata.version("lm-eval"),
    }


def engine_name(config: Config) -> str:
    """This host's, with its version and kind of device."""
    if config.generate.backend != "vllm":
        return config.generate.backend
    import vllm

    return f"vllm {vllm.__version__} on {'cuda' if torch.cuda.is_available() else 'cpu'}"


async def evaluate_suite(suite: Suite, asked: Asked, engine: Engine, tokenizer: Any, out: Path,
                         terminal: Terminal) -> SuiteResult:
    """Ask everything, write the result to `out`. What an earlier attempt on the same weights left beside it in
    `NAME.partial.jsonl` is not asked again. A cancellation ends the wave under way.

    Raises:
        ConfigError, DataError: see `run_suite`.
        OSError: an answer or the result cannot be written.
    """
    loop, started = asyncio.get_running_loop(), time.monotonic()

    def progress(done: int, of: int) -> None:
        line = f"evaluating version {asked.version.number}, {suite.name}: {done}/{of}"
        loop.call_soon_threadsafe(terminal.status, line)

    partial, context = out.with_suffix(".partial.jsonl"), repr((asked.version.digest, sorted(asked.settings.items())))
    with contextlib.closing(AnswerFile(partial, context)) as answers:
        model = EngineLM(engine, tokenizer, answers, max_length=asked.max_length, progress=progress)
        working = loop.run_in_executor(None, lambda: run_suite(
            suite, model, limit=asked.limit, temperature=asked.temperature))
        try:
            tasks = await asyncio.shield(working)
        except asyncio.CancelledError:
            engine.stop()
            await asyncio.gather(working, return_exceptions=True)
            raise
        result = SuiteResult(suite=suite.name, model=asked.model, step=asked.step, version=asked.version,
                             settings=asked.settings, seconds=time.monotonic() - started, tasks=tasks)
        result.write(out)
    partial.unlink()
    return result


def run_suite(suite: Suite, model: EngineLM, *, limit: int, temperature: float) -> dict[str, TaskResult]:
    """Results by task. The first `limit` questions of each, 0: all. Tasks that sample do so at `temperature`; at 0 they
    answer once. Synchronous: call it in a thread of its own.

    Raises:
        ConfigError: a prompt does not fit.
        DataError: a task wants what the engine does not offer.
    """
    results, loaded = dict[str, TaskResult](), suite.load()
    for chat in (True, False):
        tasks = {name: task for name, task in loaded.items() if in_chat(task) is chat}
        for task in tasks.values():
            task.set_fewshot_seed(_EXAMPLES_SEED)
            _set_temperature(task, temperature)
        if tasks:
            whole: Any = evaluate(model, {"tasks": tasks}, limit=limit or None, bootstrap_iters=0,
                                  apply_chat_template=chat, confirm_run_unsafe_code=True)
            results |= {name: _task_result(name, task, whole, model) for name, task in tasks.items()}
    return results


def in_chat(task: Any) -> bool:
    """Whether the task is asked in the model's chat template: unless its metadata says `chat: false`."""
    return bool((task.config.metadata or {}).get("chat", True))


def _set_temperature(task: Any, temperature: float) -> None:
    settings = task.config.generation_kwargs
    if settings is None or not settings.get("do_sample"):
        return
    task.set_config("generation_kwargs", {"temperature": temperature, "do_sample": temperature > 0}, update=True)
    if not temperature:
        task.set_config("repeats", 1)


def _task_result(name: str, task: Any, whole: Mapping[str, Any], model: EngineLM) -> TaskResult:
    samples: Sequence[dict[str, Any]] = whole["samples"][name]
    # With a single filter its name says nothing.
    several = len({sample["filter"] for sample in samples}) > 1
    questions: dict[int, Question] = {}
    better: dict[str, bool] = {}
    for sample in samples:
        labels = {metric: f"{metric},{sample['filter']}" if several else metric for metric in sample["metrics"]}
        values = {labels[metric]: value for metric in labels if (value := _value(metric, sample[metric])) is not None}
        better |= {labels[metric]: whole["higher_is_better"][name].get(metric) is not False for metric in labels}
        number = sample["doc_id"]
        known = questions.get(number) or _question(sample, model.truncated[name, number])
        questions[number] = replace(known, values=known.values | values)
    ordered = [questions[number] for number in sorted(questions)]
    answers = sum(len(question.answers) for question in ordered)
    generates = task.OUTPUT_TYPE == "generate_until"
    return TaskResult(
        metrics=_aggregates(whole["results"][name], several),
        higher_is_better=better,
        estimates=_estimates(ordered),
        truncated=sum(question.truncated for question in ordered) / answers if generates else None,
        settings=_settings(task, model.max_length),
        questions=ordered,
    )


def _question(sample: Mapping[str, Any], truncated: int) -> Question:
    # Everything that was asked: a choice of several is one prompt with each of them.
    asked = hashlib.sha256(repr(sample["arguments"]).encode()).hexdigest()[:16]
    answers = [_text(answer) for request in sample["resps"] for answer in request]
    return Question(sample["doc_id"], asked, sample["doc_hash"][:16], {}, answers, truncated)


def _text(answer: Any) -> str:
    """A completion, or "-12.345678 greedy" for a continuation's log-prob."""
    if isinstance(answer, str):
        return answer
    logprob, greedy = answer if isinstance(answer, tuple) else (answer, False)
    return f"{logprob:.6f}{' greedy' if greedy else ''}"


def _value(metric: str, value: Any) -> float | None:
    """For one question, as far as it is a number; of a log-likelihood, nats per unit, less being better."""
    if metric in UNITS:
        return -value[0] / value[1] if isinstance(value, tuple) else -float(value)
    return float(value) if isinstance(value, Real | np.number) else None


def _aggregates(told: Mapping[str, Any], several: bool) -> dict[str, float | None]:
    """lm-eval's, by metric; "exact_match,strict-match" where there are several filters."""
    found: defaultdict[str, float | None] = defaultdict(lambda: None)
    for key, value in told.items():
        metric, comma, _ = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            found[key if several else metric] = float(value) if isinstance(value, Real | np.number) else None
    return dict(found)


def _estimates(questions: Sequence[Question]) -> dict[str, Estimate]:
    names = dict.fromkeys(name for question in questions for name in question.values)
    columns = {name: [question.values[name] for question in questions] for name in names}
    return {name: made for name, values in columns.items() if (made := _estimate(values)) is not None}


def _estimate(values: Sequence[float]) -> Estimate | None:
    """None for a single value that is no share: nothing says how sure it is."""
    if all(0.0 <= value <= 1.0 for value in values):
        return estimate(values)
    if len(values) < 2:
        return None
    mean, half = float(np.mean(values)), 1.96 * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return Estimate(mean, mean - half, mean + half, len(values))


def _settings(task: Any, window: int) -> dict[str, Any]:
    config = task.config
    return {
        "version": str((config.metadata or {}).get("version", "")),
        "generation": config.generation_kwargs if task.OUTPUT_TYPE == "generate_until" else None,
        "samples": config.repeats,
        "num_fewshot": config.num_fewshot or 0,
        "chat": in_chat(task),
        # A longer text is scored in windows.
        "window": window if task.OUTPUT_TYPE == "loglikelihood_rolling" else None,
    }
