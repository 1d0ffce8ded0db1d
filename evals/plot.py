"""Results over a run's steps, one SVG per suite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from engine.errors import DataError
from engine.observe.estimate import Estimate
from evals.compare import measured, unit
from evals.result import SuiteResult

_COLUMNS = 3


def plot(results: Sequence[SuiteResult], path: Path) -> None:
    """Results of one suite at several steps: an axis for each task, its headline metric with the 95 % interval. What
    has no step has no place.

    Raises:
        OSError: `path` cannot be written.
    """
    names = list(dict.fromkeys(name for result in results for name in result.tasks))
    columns = min(_COLUMNS, len(names))
    rows = -(-len(names) // columns)
    # The same results give the same bytes, text stays text, and the names of models are no formulas.
    with matplotlib.rc_context({"svg.hashsalt": "farfield", "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(4 * columns, 0.6 + 2.6 * rows), layout="constrained")
        figure.suptitle(f"{results[-1].suite}, {results[-1].model}")
        for place, name in enumerate(names, start=1):
            _task(figure.add_subplot(rows, columns, place), name, results)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _task(axes: Axes, name: str, results: Sequence[SuiteResult]) -> None:
    points: list[tuple[int, Estimate]] = []
    label = ""
    for result in results:
        if (task := result.tasks.get(name)) is None or result.step is None:
            continue
        for metric in measured(task)[:1]:
            label = ", ".join(filter(None, (metric, unit(metric))))
            if metric in task.estimates:
                points.append((result.step, task.estimates[metric]))
    steps = [step for step, _ in points]
    lows, highs = [estimate.low for _, estimate in points], [estimate.high for _, estimate in points]
    axes.fill_between(steps, lows, highs, alpha=0.2, linewidth=0)
    axes.plot(steps, [estimate.mean for _, estimate in points], marker="o", markersize=3)
    axes.set(title=name, xlabel="step", ylabel=label)
    axes.grid(alpha=0.3)
    if all(low >= 0.0 and high <= 1.0 for low, high in zip(lows, highs, strict=True)):
        axes.set_ylim(bottom=0.0)


def read_suite(evals: Path, stem: str) -> list[SuiteResult]:
    """A suite's results in a run's folder `evals`, in order of steps.

    Raises:
        DataError: a file is no result.
    """
    return [SuiteResult.read(path) for path in sorted(evals.glob(f"step-*/{stem}.json"))]


def read_run(run: Path) -> dict[str, list[SuiteResult]]:
    """A run folder's results in order of steps, by the name of their files.

    Raises:
        DataError: a file is no result, or there is none.
    """
    # held_out.json has another schema; it is written without lm-eval.
    stems = sorted({path.stem for path in run.glob("evals/step-*/[!.]*.json")} - {"held_out"})
    if not stems:
        raise DataError(f"{run}/evals holds no suite's results", remedy="name the folder of a run with evals.suites")
    return {stem: read_suite(run / "evals", stem) for stem in stems}


def main_plot(run: Path) -> None:
    """Write `RUN/evals/SUITE.svg` for every suite and say where.

    Raises:
        DataError, OSError: see `read_run` and `plot`.
    """
    for name, results in read_run(run).items():
        path = run / "evals" / f"{name}.svg"
        plot(results, path)
        print(f"wrote {path}")
