"""The evaluations of a training run: every suite on the version that is served, and how the last compares."""

from __future__ import annotations

import asyncio
from pathlib import Path

from engine.config import Config
from engine.errors import DataError
from engine.observe.metrics import Value
from engine.observe.terminal import Terminal
from engine.protocols import Generator, Scorer
from engine.rollout.chat import Chat
from engine.tasks.source import TaskSource
from engine.types import Version
from evals import held_out
from evals.result import SuiteResult
from evals.suites import Suite


async def evaluate(
    *, generator: Generator, chat: Chat, tasks: TaskSource, scorer: Scorer, config: Config, folder: Path, step: int,
    version: Version, terminal: Terminal,
) -> dict[str, Value]:
    """See `engine.host.Evaluation`."""
    metrics: dict[str, Value] = {}
    for name in config.evals.suites:
        if name == "held_out":
            metrics |= await held_out.evaluate(generator=generator, chat=chat, tasks=tasks, scorer=scorer,
                                               config=config, folder=folder, terminal=terminal)
        else:
            metrics |= await _suite(name, generator, chat, config, folder, step, version, terminal)
    return metrics


async def _suite(name: str, generator: Generator, chat: Chat, config: Config, folder: Path, step: int, version: Version,
                 terminal: Terminal) -> dict[str, Value]:
    # lm-eval and what it needs take seconds to import: only for runs that use it.
    from evals.suites import find

    suite = find(name)
    out = folder / f"{suite.stem}.json"
    result = await evaluate_and_tell(suite, generator, chat, config, version, step, out, terminal)
    if told := await asyncio.to_thread(_look_back, suite, folder.parent, step == config.run.steps):
        terminal.note(f"{suite.name}, first to last: {told}")
    return {f"eval/{result.suite}/{name}": next(iter(task.metrics.values()), None)
            for name, task in result.tasks.items()}


def _look_back(suite: Suite, evals: Path, last: bool) -> str:
    """The suite's plot up to here, and after the last step how that compares with the first, in words."""
    from evals.compare import compare, render
    from evals.plot import plot, read_suite

    results = read_suite(evals, suite.stem)
    plot(results, evals / f"{suite.stem}.svg")
    if not last or len(results) < 2:
        return ""
    try:
        told = render(compare(results[0], results[-1]))
    except DataError as error:  # a run that was resumed with other settings
        return str(error)
    path = evals / f"{suite.stem}.txt"
    path.write_text(told + "\n")
    _, _, in_words = told.rpartition("\n\n")
    return f"{' '.join(in_words.split())} ({path})"


async def evaluate_and_tell(suite: Suite, generator: Generator, chat: Chat, config: Config, version: Version,
                            step: int | None, out: Path, terminal: Terminal) -> SuiteResult:
    """One suite on this host's engine: the result in `out`, a line for each task on the terminal. See
    `evals.run.evaluate_suite`."""
    from evals.model import OnLoop
    from evals.run import Asked, engine_name, evaluate_suite, settings_of

    asked = Asked(
        model=config.model.path, version=version, step=step,
        settings=settings_of(config, chat.tokenizer, engine_name(config)), limit=config.evals.limit,
        temperature=config.evals.temperature, max_length=config.generate.max_model_len,
    )
    engine = OnLoop(generator, asyncio.get_running_loop(), config.run.stage_timeout_s)
    result = await evaluate_suite(suite, asked, engine, chat.tokenizer, out, terminal)
    tell(result, terminal)
    return result


def tell(result: SuiteResult, terminal: Terminal) -> None:
    """One line for each task."""
    for name, task in result.tasks.items():
        parts = [f"{metric} {estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
                 for metric, estimate in task.estimates.items()]
        cut = [] if task.truncated is None else [f"truncated {task.truncated:.2f}"]
        terminal.note(f"{result.suite}/{name}, version {result.version.number}: {', '.join(parts + cut)}")
