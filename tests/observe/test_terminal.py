"""What is shown, on terminals of 80 columns and in plain lines."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.console import Console

from engine.observe.terminal import (
    PlainTerminal,
    RichTerminal,
    Sample,
    SilentTerminal,
    eta,
    open_terminal,
    printable,
    shorten,
    sparkline,
)

ROW = {
    "step": 3, "version": 3, "skipped": None, "reward/mean": 0.4125, "reward/trained": 0.5, "loss": 0.0125,
    "grad_norm": 0.8, "entropy": 1.25, "staleness/mean": 0.5, "staleness/max": 1, "length/leased": 100.0,
    "staleness/in_queue": 0.125, "staleness/in_flight": 0.375, "mismatch/k1": -0.012, "mismatch/k3": 0.012,
    "mismatch/k3_fresh": 0.0005, "mismatch/k3_stale": 0.0235, "mismatch/ess": 0.91, "mismatch/chi2": 0.25,
    "mismatch/prob_diff": 0.0075, "rule/fraction": 0.03,
    "length/truncated": 0.125, "tokens/generated": 12000, "tokens/trained": 6000, "groups/trained": 6,
    "groups/zero_signal": 2, "time/step": 10.0, "time/wait_rollouts": 6.0, "time/wait_stale": 0.0, "time/train": 3.5,
}  # fmt: skip
VERDICTS = {
    "mismatch/k1": "healthy", "mismatch/k3": "bad", "mismatch/ess": "healthy", "mismatch/chi2": "healthy",
    "mismatch/prob_diff": "watch", "rule/fraction": "healthy",
}  # fmt: skip
SAMPLE = Sample(prompt="2 + 3?", completion="[bold]It[/bold] is\n\x1b[31m5 [/none]", extracted="5", reward=1.0)


def rich_terminal(steps: int = 10, height: int = 40) -> tuple[RichTerminal, io.StringIO]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, height=height, color_system=None)
    return RichTerminal(console, steps=steps, title="a [red]run[/red]"), stream


def plain_terminal() -> tuple[PlainTerminal, io.StringIO]:
    stream = io.StringIO()
    return PlainTerminal(stream, steps=10, title="run", clock_s=lambda: 0.0), stream


def last_frame(stream: io.StringIO) -> list[str]:
    frame = stream.getvalue().rpartition("\x1b[2K")[2]
    return frame.removeprefix("\x1b[?25l").removesuffix("\x1b[?25h").splitlines()


def test_plain_step_is_one_line_with_eta_and_one_per_sample() -> None:
    terminal, stream = plain_terminal()
    terminal.step(ROW, [SAMPLE, SAMPLE])
    lines = stream.getvalue().splitlines()
    assert lines[1] == (
        "step 3/10  reward 0.412 (trained 0.500)  loss 0.0125  grad norm 0.8  entropy 1.250  staleness 0.5 max 1  "
        "queue 0.12 flight 0.38  length 100 cut 12%  generated 1,200 tok/s  trained 600 tok/s  groups 6 zero-signal 2  "
        "time 10.0 s (wait_rollouts 6.0, train 3.5)  eta 0:01:10"
    )
    assert lines[2:] == [r"  > 2 + 3? => [bold]It[/bold] is\n\x1b[31m5 [/none] | answer 5 | reward 1"] * 2


def test_plain_tells_of_mismatch_when_it_is_not_healthy() -> None:
    terminal, stream = plain_terminal()
    terminal.step(ROW, [])
    terminal.judged(dict.fromkeys(VERDICTS, "healthy"))
    terminal.judged({})  # a step without a token
    terminal.judged(VERDICTS)
    assert stream.getvalue().splitlines()[2:] == ["  mismatch: k3 0.012 bad, prob diff 0.0075 watch"]


def test_rich_shows_mismatch_with_its_verdicts() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, height=40, color_system="standard")
    terminal = RichTerminal(console, steps=10, title="run")
    terminal.step(ROW, [])
    terminal.judged(VERDICTS)
    terminal.close()
    frame = "\n".join(last_frame(stream))
    for coloured in ("\x1b[1;31m0.012 bad", "\x1b[33m0.0075 watch", "\x1b[32m0.91 healthy", "\x1b[32m-0.012 healthy"):
        assert coloured in frame
    plain = re.sub(r"\x1b\[[\d;]*m", "", frame)
    for figure in ("k3 0.012 bad", "k3 fresh 0.0005", "k3 stale 0.0235", "prob diff 0.0075 watch", "chi2 0.25 healthy",
                   "rule 0.03 healthy", "queue 0.12 flight 0.38"):
        assert figure in plain
    assert max(map(len, plain.splitlines())) <= 80


def test_rich_forgets_the_verdicts_of_the_step_before() -> None:
    terminal, stream = rich_terminal()
    terminal.step(ROW, [])
    terminal.judged(VERDICTS)
    terminal.step({**ROW, "step": 4, "skipped": "no group has a signal", "mismatch/k3": None}, [])
    terminal.close()
    frame = "\n".join(last_frame(stream))
    assert "k3 - " in frame
    assert "bad" not in frame


def test_plain_shows_a_skipped_step_and_nulls() -> None:
    terminal, stream = plain_terminal()
    terminal.step({"step": 1, "skipped": "loss is not finite", "loss": float("nan")}, [])
    assert "step 1/10  skipped: loss is not finite  reward - (trained -)  loss -" in stream.getvalue()
    assert stream.getvalue().endswith("time - s  eta -\n")


def test_plain_status_is_told_once_and_then_every_ten_seconds() -> None:
    stream, now_s = io.StringIO(), [0.0]
    terminal = PlainTerminal(stream, steps=1, title="run", clock_s=lambda: now_s[0])
    for at_s, text in [(0.0, "starting"), (1.0, "evaluating 1/9"), (2.0, "evaluating 2/9"), (11.0, "evaluating 8/9")]:
        now_s[0] = at_s
        terminal.status(text)
    assert stream.getvalue().splitlines()[1:] == ["  .. starting", "  .. evaluating 1/9", "  .. evaluating 8/9"]


def test_plain_survives_a_stream_that_is_ascii() -> None:
    raw = io.BytesIO()
    terminal = PlainTerminal(io.TextIOWrapper(raw, encoding="ascii"), steps=1, title="run")
    terminal.note("5 \u20ac\r")
    assert raw.getvalue().splitlines()[-1] == rb"  -- 5 \u20ac\r"
    terminal.close()


def test_rich_frame_fits_80_columns_and_keeps_markup_as_text() -> None:
    terminal, stream = rich_terminal()
    terminal.step({**ROW, "reward/mean": 0.0}, [])
    terminal.step(ROW, [SAMPLE])
    terminal.close()
    frame = last_frame(stream)
    assert max(len(line) for line in frame) <= 80
    assert "a [red]run[/red]" in frame[0]
    assert frame[1].startswith("step 3/10 ")
    assert frame[1].endswith("eta 0:01:10")
    assert frame[2].rstrip() == "reward 0.412 (trained 0.500)  \u2581\u2588"
    text = "\n".join(line.rstrip() for line in frame)
    assert "> 2 + 3?\n  [bold]It[/bold] is\\n\\x1b[31m5 [/none]\n  answer 5 | reward 1" in text
    for figure in ("loss 0.0125", "generated 1,200 tok/s", "trained 600 tok/s", "staleness 0.5 max 1", "time 10.0 s"):
        assert figure in text


def test_rich_long_samples_take_few_lines() -> None:
    terminal, stream = rich_terminal(height=24)
    long = Sample(prompt="p" * 500, completion="c" * 5000, extracted="e" * 500, reward=None)
    terminal.step({**ROW, "skipped": "no signal"}, [long] * 3)
    terminal.close()
    frame = last_frame(stream)
    assert len(frame) <= 24
    assert max(len(line) for line in frame) <= 80
    assert "skipped: no signal" in "\n".join(frame)


def test_rich_notes_stay_and_statuses_do_not() -> None:
    terminal, stream = rich_terminal()
    terminal.status("starting [vLLM]")
    terminal.note("saved [step-3]")
    terminal.close()
    assert "starting [vLLM]" in stream.getvalue()
    assert "saved [step-3]" in stream.getvalue()
    assert "starting [vLLM]" not in "\n".join(last_frame(stream))


def test_rich_gives_the_cursor_back_after_an_exception_and_closes_twice() -> None:
    terminal, stream = rich_terminal()

    def run() -> None:
        try:
            terminal.step(ROW, [SAMPLE])
            raise KeyboardInterrupt
        finally:
            terminal.close()

    with pytest.raises(KeyboardInterrupt):
        run()
    terminal.close()
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1
    assert stream.getvalue().endswith("\n\x1b[?25h")


def test_auto_is_plain_where_stdout_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(open_terminal("auto", steps=1, title="run"), PlainTerminal)


def test_off_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = open_terminal("off", steps=1, title="run")
    terminal.status("x")
    terminal.step(ROW, [SAMPLE])
    terminal.note("x")
    terminal.close()
    assert isinstance(terminal, SilentTerminal)
    assert capsys.readouterr().out == ""


def test_eta_is_the_mean_time_of_the_latest_steps() -> None:
    rows = [{"step": 8, "time/step": 10.0}, {"step": 9, "time/step": None}, {"step": 10, "time/step": 20.0}]
    assert eta(rows, 250) == "1:00:00"  # 240 steps of 15 s
    assert eta(rows[:1], 8) == "0:00:00"
    assert eta([], 8) == "-"


def test_sparkline() -> None:
    assert sparkline([0.0, 0.5, None, 1.0]) == "\u2581\u2585 \u2588"
    assert sparkline([0.3, 0.3]) == "\u2581\u2581"
    assert sparkline([None]) == " "


def test_printable() -> None:
    assert printable("a\tb\r\u202e\ud800\\n \u00e9\u4f60") == "a\\tb\\r\\u202e\\ud800\\n \u00e9\u4f60"


def test_shorten() -> None:
    assert shorten("0123456789", 10) == "0123456789"
    assert shorten("0123456789A", 10) == "012...789A"
    assert shorten("0123456789A", 10, keep="end") == "...456789A"
