"""A row from hand-made groups, value by value."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hand_made import group, packing, rollout

from engine.clock import run_virtual
from engine.observe.metrics import KEYS, Row, read_groups
from engine.observe.recorder import Recorder, Timings, samples
from engine.observe.terminal import Sample, SilentTerminal
from engine.protocols import StepResult
from engine.train.pack import build_batch
from engine.types import Group


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def now(self) -> float:
        return self.now_s


class Watching(SilentTerminal):
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.shown: list[tuple[Row, list[Sample]]] = []
        self.verdicts: list[Any] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, row: Row, samples: Any) -> None:
        self.shown.append((row, samples))

    def judged(self, verdicts: Any) -> None:
        self.verdicts.append(verdicts["mismatch/k1"])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("engine.observe.recorder.now", made.now)
    return made


def recorder(folder: Path, terminal: SilentTerminal | None = None, count: int = 2) -> Recorder:
    return Recorder(
        folder, terminal or SilentTerminal(), envs=["sums", "words"], samples=count, tensorboard=False,
        micro_batch_tokens=8,
    )  # fmt: skip


LEDGER = ("/leased", "/completed", "/trained", "/zero_signal", "/stale", "/rejected", "/timed_out", "/length_leased",
          "/length_trained")


def consumed() -> list[Group]:
    """One group to train on, 4 and 3 tokens long with 2 and 1 sampled, of versions 3 and 4; one without signal."""
    return [
        group(
            rollout(1.0, sampled=[3, 4], version=3, text="good"),
            rollout(0.0, sampled=[5], index=1, version=4, stop_reason="length", text="bad"),
        ),
        group(rollout(0.5, sampled=[6, 7, 8], text="same"), rollout(0.5, index=1, text="same too"), order=1),
    ]


def write(to: Recorder, clock: Clock, *, step: int = 1, groups: list[Group] | None = None, **result: Any) -> None:
    """A step that took 10 seconds: waited 2, trained 4, and so on."""
    batch, fates = build_batch(
        consumed() if groups is None else groups, packing(micro_batch_tokens=4), version=0
    )
    timings = Timings()
    for name, seconds in (("wait_rollouts", 2.0), ("train", 4.0), ("publish", 1.0), ("switch", 0.5)):
        timings.add(name, seconds)
    clock.now_s += 10.0
    version = 4 if result.get("skipped") else 5
    to.step(step, 4, version, fates, batch, StepResult(**result), timings, 2.5, {"asleep": 2**30})


def test_a_row_by_hand(tmp_path: Path, clock: Clock) -> None:
    book = recorder(tmp_path)
    clock.now_s += 60.0  # loading, an evaluation
    book.start()
    for env in ("sums", "sums", "words"):
        book.leased(env)
    write(book, clock, metrics={"loss": 0.25, "grad_norm": 2.0, "lr": 1e-5, "mismatch/k1": -0.125})
    book.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert row == book.rows[0]
    of_envs = {
        f"{family}/{env}{what}"
        for env in ("sums", "words")
        for family, ends in {"reward": [""], "share": [""], "ledger": LEDGER}.items()
        for what in ends
    }
    assert set(row) == {key.name for key in KEYS} | of_envs | {"memory/host_peak", "memory/asleep"}
    expected = {
        "step": 1, "version": 5, "skipped": None, "time_s": 70.0,
        "reward/mean": 0.5,  # 1, 0, .5, .5
        "reward/trained": 0.5,
        "reward/std": pytest.approx(0.125**0.5),
        "reward/sums": 0.5, "reward/words": None, "share/sums": 1.0, "share/words": 0.0, "reward/timeouts": 0,
        "groups/leased": 3, "groups/completed": 2, "groups/trained": 1, "groups/zero_signal": 1, "groups/stale": 0,
        "groups/rejected": 0, "groups/timed_out": 0,
        "tokens/generated": 7, "tokens/trained": 3,
        "length/leased": 1.75, "length/trained": 1.5, "length/truncated": 0.25,
        "staleness/mean": 1.0, "staleness/max": 1,  # version 4 before the step, oldest token of version 3
        "staleness/in_flight": 1.0, "staleness/in_queue": 0.0,  # its newest of version 4
        "loss": 0.25, "grad_norm": 2.0, "lr": 1e-5, "mismatch/k1": -0.125,
        "pack/efficiency": 7 / 16,  # 4 and 3 tokens in two micro-batches of 8
        "time/step": 10.0, "time/wait_rollouts": 2.0, "time/train": 4.0, "time/publish": 1.0, "time/switch": 0.5,
        "time/eval": 0.0,
        "busy/generator": 0.25, "busy/trainer": 0.4, "memory/asleep": 1.0,
        "ledger/sums/leased": 2, "ledger/words/leased": 1, "ledger/sums/trained": 1, "ledger/sums/zero_signal": 1,
        "ledger/sums/length_leased": 1.75, "ledger/sums/length_trained": 1.5, "ledger/words/completed": 0,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert row["memory/host_peak"] > 0
    # What nobody reported is null, never 0.
    assert {name for name, value in row.items() if value is None} == {
        "skipped", "reward/words", "entropy", "kl/ref", "mismatch/k3", "mismatch/k3_fresh", "mismatch/k3_stale",
        "mismatch/ess", "mismatch/chi2", "mismatch/prob_diff", "mismatch/ratio_mean",
        "rule/fraction", "loop/lag_p99_ms",
        "ledger/words/length_leased", "ledger/words/length_trained",
    }  # fmt: skip


def test_a_row_counts_from_the_one_before(tmp_path: Path, clock: Clock) -> None:
    book = recorder(tmp_path)
    book.leased("sums")
    book.evaluated({"eval/held_out/sums": 0.5}, 3.0)
    write(book, clock)
    book.leased("sums")
    book.leased("sums")
    clock.now_s += 5.0
    write(book, clock, step=2)
    book.close()
    first, second = book.rows
    assert (first["groups/leased"], second["groups/leased"]) == (1, 2)
    assert (first["time/step"], second["time/step"]) == (10.0, 15.0)
    assert (first["time_s"], second["time_s"]) == (10.0, 25.0)
    assert first["eval/held_out/sums"] == 0.5
    assert "eval/held_out/sums" not in second
    assert (first["time/eval"], second["time/eval"]) == (3.0, 0.0)


def test_a_skipped_step_is_said_everywhere(tmp_path: Path, clock: Clock) -> None:
    terminal = Watching()
    book = recorder(tmp_path, terminal)
    flat = [group(rollout(0.5), rollout(0.5, index=1))]
    write(book, clock, step=7, groups=flat, skipped="no group has a signal")
    book.close()
    (row,) = book.rows
    assert (row["skipped"], row["version"], row["loss"]) == ("no group has a signal", 4, None)
    assert (row["pack/efficiency"], row["groups/trained"], row["staleness/max"]) == (None, 0, None)
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (event["kind"], event["step"], event["reason"]) == ("skipped", 7, "no group has a signal")
    assert terminal.notes == ["step 7 changed no weights: no group has a signal"]


def test_every_group_is_kept_with_its_fate(tmp_path: Path, clock: Clock) -> None:
    book = recorder(tmp_path)
    write(book, clock, step=3)
    book.close()
    kept = list(read_groups(tmp_path / "rollouts" / "step-000003.jsonl.zst"))
    assert [(one.lease.order, one.outcome) for one in kept] == [(0, "trained"), (1, "zero_signal")]
    assert [one.rollouts[0].token_ids.tolist() for one in kept] == [[1, 2, 3, 4], [1, 2, 6, 7, 8]]


def test_the_terminal_sees_the_row_and_the_best_of_the_first_groups(tmp_path: Path, clock: Clock) -> None:
    terminal = Watching()
    book = recorder(tmp_path, terminal, count=1)
    write(book, clock)
    book.close()
    ((row, shown),) = terminal.shown
    assert row == book.rows[0]
    assert shown == [Sample(prompt="2 + 3?", completion="good", extracted=None, reward=1.0)]


def test_a_sample_without_any_reward_is_shown_too() -> None:
    failed = group(rollout(None, text="first"), rollout(None, index=1, text="second"))
    zero = group(rollout(None, text="none"), rollout(0.0, index=1, text="zero"))
    unborn = group(order=3, outcome="rejected")
    shown = samples([unborn, failed, zero, failed], 2)
    assert [(one.completion, one.reward) for one in shown] == [("first", None), ("zero", 0.0)]


def test_a_generator_that_was_busy_all_the_time_is_busy_once(tmp_path: Path, clock: Clock) -> None:
    book = recorder(tmp_path)
    batch, fates = build_batch(consumed(), packing(estimator="centered", micro_batch_tokens=8), version=0)
    clock.now_s += 1.0
    book.step(1, 4, 5, fates, batch, StepResult(), Timings(), 1.5, {})
    book.close()
    assert book.rows[0]["busy/generator"] == 1.0


def test_the_loops_lateness_is_measured(tmp_path: Path, clock: Clock) -> None:
    """A loop that is kept busy for 50 ms answers a timer late by about as much; an idle one in no time."""
    book = recorder(tmp_path)

    async def watched(block: bool) -> None:
        watching = asyncio.ensure_future(book.watch_lag())
        for _ in range(3):
            await asyncio.sleep(0.02)
            if block:
                late = asyncio.get_running_loop().time() + 0.05
                while asyncio.get_running_loop().time() < late:
                    pass
        watching.cancel()

    run_virtual(watched(False))
    write(book, clock)
    asyncio.run(watched(True))
    write(book, clock, step=2)
    write(book, clock, step=3)
    book.close()
    idle, blocked, unmeasured = (row["loop/lag_p99_ms"] for row in book.rows)
    assert idle == pytest.approx(0.0, abs=1e-6)
    assert isinstance(blocked, float)
    assert blocked > 30
    assert unmeasured is None


def test_timings_add_up(clock: Clock) -> None:
    timings = Timings()
    for seconds in (1.5, 2.0):
        with timings.measure("train"):
            clock.now_s += seconds
    timings.add("train", 0.25)
    assert timings.get("train") == 3.75
    assert timings.get("publish") == 0.0


def test_a_verdict_is_told_when_it_changes(tmp_path: Path, clock: Clock) -> None:
    terminal = Watching()
    book = recorder(tmp_path, terminal)
    for step, word in enumerate(("healthy", "bad", "bad", "watch", "healthy"), start=1):
        verdicts = {"mismatch/k1": word, "mismatch/ess": "healthy"}
        book.judged(step, verdicts, {"mismatch/k1": 0.125, "mismatch/ess": 0.5})
    book.close()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["step"], event["mismatch/k1"]) for event in events] == [(2, "bad"), (4, "watch"), (5, "healthy")]
    assert terminal.verdicts == ["healthy", "bad", "bad", "watch", "healthy"]
    assert all("mismatch/ess" not in event for event in events)
    assert [note.partition(" (")[0] for note in terminal.notes] == ["step 2: mismatch/k1 = 0.125 is bad"]
