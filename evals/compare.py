"""Two results of one suite against each other, question by question: docs/comparing.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import scipy.stats

from engine.errors import DataError
from evals.result import UNITS, SuiteResult, TaskResult

# Share of comparisons of equal models in which any task may be called better or worse.
_LEVEL = 0.05
_RESAMPLES = 2000
# Truncation rates further apart than this are remarked upon.
_CUT = 0.1

Verdict = Literal["better", "worse", "no difference shown"]


class Paired(msgspec.Struct, frozen=True, kw_only=True):
    """One metric: the means over questions, b - a with its 95 % interval, the questions on which b is better, worse and
    the same, and the two-sided sign test's p. `unit` is empty where the metric's name says it."""

    metric: str
    unit: str
    higher_is_better: bool
    a: float
    b: float
    difference: float
    low: float
    high: float
    better: int
    worse: int
    same: int
    p: float


class TaskComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One task. The verdict on b is the first metric's; `corrected_p` is its p, corrected for the number of tasks. Both
    null where no metric has a value per question. `truncated`: a's rate and b's."""

    task: str
    metrics: list[Paired]
    corrected_p: float | None
    verdict: Verdict | None
    truncated: tuple[float, float] | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """`a` and `b` say whose results they are: "smollm2-135m-instruct, step 20, version 20"."""

    suite: str
    a: str
    b: str
    same_weights: bool
    tasks: list[TaskComparison]


def compare(a: SuiteResult, b: SuiteResult) -> Comparison:
    """Two calls say the same.

    Raises:
        DataError: anything but model, version and step differs.
    """
    for what, of_a, of_b, remedy in _likeness(a, b):
        if of_a != of_b:
            raise DataError(f"not comparable: {what} is {of_a!r} in the first and {of_b!r} in the second",
                            remedy=remedy)
    metrics = {name: [_paired(metric, task, b.tasks[name]) for metric in measured(task)]
               for name, task in a.tasks.items()}
    judged = {name: own[0] for name, own in metrics.items() if own}
    corrected = dict(zip(judged, holm([first.p for first in judged.values()]), strict=True))
    return Comparison(
        suite=a.suite, a=_name(a), b=_name(b), same_weights=a.version.digest == b.version.digest,
        tasks=[TaskComparison(
            task=name, metrics=own, corrected_p=corrected.get(name),
            verdict=_verdict(judged[name], corrected[name]) if name in judged else None,
            truncated=_truncated(a.tasks[name], b.tasks[name]),
        ) for name, own in metrics.items()],
    )  # fmt: skip


def measured(task: TaskResult) -> list[str]:
    """The metrics that have a value for every question, in lm-eval's order. The first is the task's headline."""
    return [metric for metric in task.metrics if all(metric in question.values for question in task.questions)]


def unit(metric: str) -> str:
    """Of a question's value; empty where the metric's name says it."""
    return UNITS.get(metric.partition(",")[0], "")


def interval(differences_Q: np.ndarray) -> tuple[float, float]:
    """95 % interval of the mean by bootstrap over questions; why percentiles: docs/comparing.md. Of equal differences:
    their value, twice."""
    if np.ptp(differences_Q) == 0:
        return float(differences_Q[0]), float(differences_Q[0])
    found = scipy.stats.bootstrap((differences_Q,), np.mean, n_resamples=_RESAMPLES, method="percentile",
                                  rng=np.random.default_rng(0)).confidence_interval
    return float(found.low), float(found.high)


def holm(ps: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979, Scandinavian Journal of Statistics 6): rejecting those up to .05 rejects any true
    hypothesis with probability .05 at most, however the tasks depend on each other."""
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda index: ps[index])):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = largest
    return adjusted


def sign_test(better: int, worse: int) -> float:
    """Two-sided p, exact; ties are left out."""
    return float(scipy.stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0


def _likeness(a: SuiteResult, b: SuiteResult) -> Iterator[tuple[str, object, object, str]]:
    """What has to be equal, from the outside in: its name, a's, b's, and what to do if it is not."""
    yield "suite", a.suite, b.suite, "name two results of one suite"
    for key in sorted(a.settings | b.settings):
        yield f"settings.{key}", a.settings.get(key), b.settings.get(key), "evaluate both on engines that are set alike"
    yield "tasks", sorted(a.tasks), sorted(b.tasks), "evaluate both with the same task files"
    for name, of_a in a.tasks.items():
        of_b = b.tasks[name]
        for key in sorted(of_a.settings | of_b.settings):
            yield (f"{name}: settings.{key}", of_a.settings.get(key), of_b.settings.get(key),
                   "evaluate both with the same task file and the same evals.* settings")
        yield (f"{name}: number of questions", len(of_a.questions), len(of_b.questions),
               "evaluate both with the same limit")
        for one, other in zip(of_a.questions, of_b.questions, strict=True):
            place = f"{name}, question {one.number}"
            yield f"{place}: number", one.number, other.number, "evaluate both on the same questions"
            yield f"{place}: data", one.data, other.data, "evaluate both on the same data"
            yield (f"{place}: prompt", one.prompt, other.prompt,
                   "evaluate both with the same prompt, template and examples")
        yield f"{name}: metrics", measured(of_a), measured(of_b), "evaluate both with the same task file"
        yield (f"{name}: higher_is_better", of_a.higher_is_better, of_b.higher_is_better,
               "evaluate both with the same task file")


def _paired(metric: str, a: TaskResult, b: TaskResult) -> Paired:
    a_Q, b_Q = (np.asarray([question.values[metric] for question in task.questions]) for task in (a, b))
    differences_Q = b_Q - a_Q
    low, high = interval(differences_Q)
    higher = a.higher_is_better[metric]
    gains_Q = differences_Q if higher else -differences_Q
    better, worse = int((gains_Q > 0).sum()), int((gains_Q < 0).sum())
    return Paired(
        metric=metric, unit=unit(metric), higher_is_better=higher, a=float(a_Q.mean()), b=float(b_Q.mean()),
        difference=float(differences_Q.mean()), low=low, high=high, better=better, worse=worse,
        same=len(gains_Q) - better - worse, p=sign_test(better, worse),
    )  # fmt: skip


def _verdict(first: Paired, corrected_p: float) -> Verdict:
    """The sign test decides; the mean must not contradict it, since a few large losses outweigh many small gains."""
    improves = first.better > first.worse
    beyond = first.low > 0 if improves == first.higher_is_better else first.high < 0
    if corrected_p > _LEVEL or not beyond:
        return "no difference shown"
    return "better" if improves else "worse"


def _truncated(a: TaskResult, b: TaskResult) -> tuple[float, float] | None:
    return None if a.truncated is None or b.truncated is None else (a.truncated, b.truncated)


def _name(result: SuiteResult) -> str:
    step = "" if result.step is None else f"step {result.step}, "
    return f"{result.model}, {step}version {result.version.number}"


def render(comparison: Comparison) -> str:
    """A table for people, the verdicts in words as its last line."""
    rows = [(_label(paired), f"{paired.a:.3f}", f"{paired.b:.3f}",
             f"{paired.difference:+.3f} [{paired.low:+.3f}, {paired.high:+.3f}]",
             f"{paired.better}/{paired.worse}/{paired.same}", _p(paired.p))
            for task in comparison.tasks for paired in task.metrics]
    head = ("", "a", "b", "b - a [95 % interval]", "better/worse/=", "p")
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    table = ["  ".join((cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:]))) for cells in (head, *rows)]
    lines = [comparison.suite, f"  a: {comparison.a}", f"  b: {comparison.b}"]
    if comparison.same_weights:
        lines.append("  a and b are the same weights: what differs comes from the evaluation")
    lines += ["", table.pop(0)]
    for task in comparison.tasks:
        lines.append(_heading(task))
        lines += [table.pop(0) for _ in task.metrics]
        if task.truncated and abs(task.truncated[1] - task.truncated[0]) > _CUT:
            lines.append("  ! the shares cut at the limit are far apart: length alone may explain the difference")
    return "\n".join([*lines, "", _in_words(comparison.tasks)])


def _label(paired: Paired) -> str:
    remark = paired.unit or ("" if paired.higher_is_better else "less is better")
    return f"  {paired.metric}" + (f" ({remark})" if remark else "")


def _p(p: float) -> str:
    return "<0.0001" if p < 0.0001 else f"{p:.4f}"


def _heading(task: TaskComparison) -> str:
    if task.corrected_p is None:
        return f"{task.task}: not compared, no metric has a value for each question"
    cut = f", cut at the limit {task.truncated[0]:.2f} -> {task.truncated[1]:.2f}" if task.truncated else ""
    return f"{task.task}: {task.verdict} (corrected p {_p(task.corrected_p)}{cut})"


def _in_words(tasks: Sequence[TaskComparison]) -> str:
    judged = [task for task in tasks if task.verdict]
    told: list[str] = []
    for verdict in ("better", "worse"):
        names = [task.task for task in judged if task.verdict == verdict]
        told.append(f"{verdict} on {len(names)} of {len(judged)}" + (f" ({', '.join(names)})" if names else ""))
    open_ = sum(task.verdict == "no difference shown" for task in judged)
    return textwrap.fill(f"b is {', '.join(told)}; no difference shown on {open_}", 108)


def main_compare(a: Path, b: Path) -> None:
    """Print how the result at `b` compares to the one at `a`.

    Raises:
        DataError: see `compare` and `SuiteResult.read`.
    """
    print(render(compare(SuiteResult.read(a), SuiteResult.read(b))))
