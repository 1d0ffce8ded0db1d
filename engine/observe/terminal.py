"""What the user sees while a run goes on: a live display on a terminal, plain lines anywhere else.

Completions are the model's words and may hold anything: they are never read as markup, and whatever is not printable
is shown escaped.
"""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Literal, Protocol, TextIO

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from engine.observe.metrics import Row, number

_WINDOW = 40
_STATUS_EVERY_S = 10.0
_COLOURS = {"": "", "healthy": "green", "watch": "yellow", "bad": "bold red"}


_MISMATCH = {
    "k3": "mismatch/k3", "k3 fresh": "mismatch/k3_fresh", "k3 stale": "mismatch/k3_stale",
    "k1": "mismatch/k1", "chi2": "mismatch/chi2", "ess": "mismatch/ess",
    "prob diff": "mismatch/prob_diff", "rule": "rule/fraction",
}  # fmt: skip


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to look at: `Sample(prompt="2 + 3?", completion="It is 5.", extracted="5", reward=1.0)`."""

    prompt: str
    completion: str
    extracted: str | None
    reward: float | None


class Terminal(Protocol):
    """Where a run tells its user how it goes."""

    def status(self, text: str) -> None:
        """What the engine is doing now, such as `evaluating 120/256`."""
        ...

    def step(self, row: Row, samples: Sequence[Sample]) -> None:
        """One step's metrics row and a few of its completions."""
        ...

    def judged(self, verdicts: Mapping[str, str]) -> None:
        """What the latest step's mismatch metrics mean: healthy, watch or bad, by their names."""
        ...

    def note(self, text: str) -> None:
        """A line that stays: a checkpoint, an evaluation's result, a skipped step."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was found. May be called twice."""
        ...


def open_terminal(mode: Literal["auto", "rich", "plain", "off"], *, steps: int, title: str) -> Terminal:
    """A terminal for a run of `steps` steps; `auto` is rich where stdout is a capable terminal."""
    if mode == "off":
        return SilentTerminal()
    capable = sys.stdout.isatty() and "utf" in sys.stdout.encoding.lower() and not Console().is_dumb_terminal
    if mode == "rich" or (mode == "auto" and capable):
        return RichTerminal(Console(force_terminal=True), steps=steps, title=title)
    return PlainTerminal(sys.stdout, steps=steps, title=title)


class SilentTerminal:
    """Shows nothing."""

    def status(self, text: str) -> None: ...

    def step(self, row: Row, samples: Sequence[Sample]) -> None: ...

    def judged(self, verdicts: Mapping[str, str]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class PlainTerminal:
    """Lines for log files and pipes: one per step, one per sample, one per note."""

    def __init__(
        self, stream: TextIO, *, steps: int, title: str, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._steps, self._clock_s = stream, steps, clock_s
        self._rows: deque[Row] = deque(maxlen=_WINDOW)
        self._told: set[str] = set()
        self._told_at_s = float("-inf")
        self._print(f"{title}: {steps} steps")

    def status(self, text: str) -> None:
        """Printed when it says something new; what differs in its digits only, every 10 s."""
        wording = re.sub(r"\d+", "", text)
        if wording in self._told and self._clock_s() - self._told_at_s < _STATUS_EVERY_S:
            return
        self._told.add(wording)
        self._told_at_s = self._clock_s()
        self._print(f"  .. {text}")

    def step(self, row: Row, samples: Sequence[Sample]) -> None:
        self._rows.append(row)
        skipped = [f"skipped: {row['skipped']}"] if row.get("skipped") else []
        figures = "  ".join([*skipped, *(f"{label} {value}" for label, value in step_figures(row))])
        self._print(f"step {row['step']}/{self._steps}  {figures}  eta {eta(self._rows, self._steps)}")
        for sample in samples:
            question, completion = shorten(printable(sample.prompt), 60, keep="end"), printable(sample.completion)
            self._print(f"  > {question} => {shorten(completion, 120)} | {_judgement(sample)}")

    def judged(self, verdicts: Mapping[str, str]) -> None:
        """Printed when something is not healthy."""
        figures = mismatch_figures(self._rows[-1], verdicts)
        if told := [f"{label} {value} {word}" for label, value, word in figures if word not in ("", "healthy")]:
            self._print(f"  mismatch: {', '.join(told)}")

    def note(self, text: str) -> None:
        self._print(f"  -- {text}")

    def close(self) -> None:
        self._stream.flush()

    def _print(self, line: str) -> None:
        # A stream that cannot show a character must not end the run.
        encoding = self._stream.encoding or "utf-8"
        shown = printable(line).encode(encoding, "backslashreplace").decode(encoding)
        print(shown, file=self._stream, flush=True)


class RichTerminal:
    """A display that is redrawn in place; notes scroll by above it and the last frame stays."""

    def __init__(self, console: Console, *, steps: int, title: str) -> None:
        self._console, self._steps, self._title = console, steps, title
        self._rows: deque[Row] = deque(maxlen=_WINDOW)
        self._samples: Sequence[Sample] = ()
        self._verdicts: Mapping[str, str] = {}
        self._spinner = Spinner("dots", text=Text("starting"))
        self._live = Live(self._frame(), console=console, refresh_per_second=4)
        self._live.start()

    def status(self, text: str) -> None:
        self._spinner.update(text=_line(printable(text)))
        self._live.update(self._frame())

    def step(self, row: Row, samples: Sequence[Sample]) -> None:
        self._rows.append(row)
        self._samples, self._verdicts = samples, {}
        self._live.update(self._frame())

    def judged(self, verdicts: Mapping[str, str]) -> None:
        self._verdicts = verdicts
        self._live.update(self._frame())

    def note(self, text: str) -> None:
        self._console.print(Text(printable(text)))

    def close(self) -> None:
        self._live.update(Group(*self._progress(), *self._results()))
        self._live.stop()

    def _frame(self) -> Group:
        # The spinner stands above what may be cut off on a low terminal.
        return Group(*self._progress(), self._spinner, *self._results())

    def _progress(self) -> tuple[Rule, Table]:
        done = int(number(self._rows[-1]["step"]) or 0) if self._rows else 0
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column()
        bar.add_column(ratio=1)
        bar.add_column(justify="right")
        bar.add_row(
            f"step {done}/{self._steps}",
            ProgressBar(total=self._steps, completed=done),
            f"eta {eta(self._rows, self._steps)}",
        )
        return Rule(_line(printable(self._title)), style="dim"), bar

    def _results(self) -> list[Text | Table]:
        if not self._rows:
            return []
        row = self._rows[-1]
        reward, *cells, times = [Text.assemble((f"{label} ", "dim"), value) for label, value in step_figures(row)]
        cells += [
            Text.assemble((f"{label} ", "dim"), (f"{value} {word}", _COLOURS[word]))
            for label, value, word in mismatch_figures(row, self._verdicts)
        ]
        table = Table.grid(padding=(0, 2), expand=True)
        for _ in range(3):
            table.add_column(ratio=1, no_wrap=True)
        for start in range(0, len(cells), 3):
            table.add_row(*cells[start : start + 3])
        rewards = sparkline([number(past.get("reward/mean")) for past in self._rows])
        skipped = [_line(printable(f"skipped: {row['skipped']}"), style="red")] if row.get("skipped") else []
        samples = [self._sample(sample) for sample in self._samples]
        return [*skipped, reward + Text(f"  {rewards}", style="green"), table, times, *samples]

    def _sample(self, sample: Sample) -> Table:
        width = self._console.width - 2
        lines = Table.grid(expand=True)
        lines.add_column(width=2)
        lines.add_column(ratio=1)
        lines.add_row("> ", _line(shorten(printable(sample.prompt), width, keep="end"), style="dim"))
        lines.add_row("", Text(shorten(printable(sample.completion), 2 * width - 10)))
        lines.add_row("", _line(_judgement(sample), style="green" if (sample.reward or 0) > 0 else "yellow"))
        return lines


def step_figures(row: Row) -> list[tuple[str, str]]:
    """(label, value) of a step, the reward first and the times last; `-` where the row has null."""
    return [
        ("reward", f"{_figure(row, 'reward/mean', '.3f')} (trained {_figure(row, 'reward/trained', '.3f')})"),
        ("loss", _figure(row, "loss", ".4g")),
        ("grad norm", _figure(row, "grad_norm", ".3g")),
        ("entropy", _figure(row, "entropy", ".3f")),
        ("staleness", f"{_figure(row, 'staleness/mean', '.2g')} max {_figure(row, 'staleness/max', '.0f')}"),
        ("queue", f"{_figure(row, 'staleness/in_queue', '.2g')} flight {_figure(row, 'staleness/in_flight', '.2g')}"),
        ("length", f"{_figure(row, 'length/leased', '.0f')} cut {_figure(row, 'length/truncated', '.0%')}"),
        ("generated", _rate(row, "tokens/generated")),
        ("trained", _rate(row, "tokens/trained")),
        ("groups", f"{_figure(row, 'groups/trained', '.0f')} zero-signal {_figure(row, 'groups/zero_signal', '.0f')}"),
        ("time", _times(row)),
    ]


def mismatch_figures(row: Row, verdicts: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(label, value, verdict) of what says how far the policy is from the one that sampled; a verdict is empty where
    there is none. k3 of fresh tokens is what engine and trainer compute differently, k3 of stale ones has age in it."""
    return [(label, _figure(row, name, ".3g"), verdicts.get(name, "")) for label, name in _MISMATCH.items()]


def eta(rows: Sequence[Row], steps: int) -> str:
    """Time left as h:mm:ss, from the mean time of the latest steps."""
    times_s = [time_s for row in rows if (time_s := number(row.get("time/step"))) is not None]
    if not times_s:
        return "-"
    left = steps - int(number(rows[-1]["step"]) or 0)
    return str(timedelta(seconds=round(left * sum(times_s) / len(times_s))))


def sparkline(values: Sequence[float | None]) -> str:
    """One character per value, from the smallest to the largest; a gap where there is none.

    `sparkline([0.0, 0.5, None, 1.0])` is `▁▅ █`.
    """
    known = [value for value in values if value is not None]
    bottom, top = min(known, default=0.0), max(known, default=0.0)
    scale = 7 / (top - bottom) if top > bottom else 0.0
    return "".join(" " if value is None else "▁▂▃▄▅▆▇█"[round(scale * (value - bottom))] for value in values)


def printable(text: str) -> str:
    """The text on one line: line ends, control and other invisible characters become Python's escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shorten(text: str, width: int, *, keep: Literal["both", "end"] = "both") -> str:
    """At most `width` characters; what is left out, in the middle or at the start, is marked by `...`."""
    if len(text) <= width:
        return text
    head = (width - 3) // 2 if keep == "both" else 0
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _judgement(sample: Sample) -> str:
    answer = "no answer" if sample.extracted is None else f"answer {shorten(printable(sample.extracted), 40)}"
    return f"{answer} | reward {'-' if sample.reward is None else format(sample.reward, '.3g')}"


def _figure(row: Row, name: str, form: str) -> str:
    value = number(row.get(name))
    return "-" if value is None else format(value, form)


def _rate(row: Row, name: str) -> str:
    tokens, time_s = number(row.get(name)), number(row.get("time/step"))
    return "-" if tokens is None or not time_s else f"{tokens / time_s:,.0f} tok/s"


def _times(row: Row) -> str:
    parts = ("wait_rollouts", "wait_stale", "train", "publish", "switch", "eval")
    spent = [f"{part} {_figure(row, f'time/{part}', '.1f')}" for part in parts if number(row.get(f"time/{part}"))]
    total = f"{_figure(row, 'time/step', '.1f')} s"
    return f"{total} ({', '.join(spent)})" if spent else total
