"""The simulator against times worked out by hand, and its bound against every schedule."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from msgspec.structs import replace

from profiling.bench import makespan, throughput
from profiling.simulate import Schedule, Shape, lower_bound_s, simulate

# A wave of 4: one step of 1 + 4 * .5 + 40 * .1 = 7 s and four of 3 s, 19 s together. Training: 2 + 60 * .25 = 17 s.
BY_HAND = Shape(
    group_size=2, groups_per_step=2, max_in_flight=4, prompt_tokens=10, mean_tokens=5, step_s=1.0,
    step_s_per_sequence=0.5, prefill_s_per_token=0.1, train_s=2.0, train_s_per_token=0.25, publish_s=3.0,
)
UNEVEN = replace(BY_HAND, mean_tokens=20, sigma=1.0, max_new_tokens=200)


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_constant_lengths_in_turns(max_staleness: int) -> None:
    schedule = Schedule(max_staleness=max_staleness)
    outcome = simulate(BY_HAND, schedule, steps=20)
    # Everything in turn, whatever may be stale: 19 + 17 + 3 s, and nothing of it can be saved.
    assert outcome.makespan_s == pytest.approx(20 * 39)
    assert outcome.tokens_per_s == pytest.approx(20 / 39)
    assert outcome.total("time/train") == pytest.approx(17 * len(outcome.steady))
    assert outcome.total("time/publish") == pytest.approx(3 * len(outcome.steady))
    assert lower_bound_s(BY_HAND, schedule, steps=20) == pytest.approx(20 * 39)


def test_handing_over_and_stalls_take_their_time() -> None:
    shape = replace(BY_HAND, sleep_s=6.0, stall_s=8.0, stall_every=4)
    outcome = simulate(shape, Schedule(), steps=20)
    assert outcome.makespan_s == pytest.approx(20 * (39 + 6) + 5 * 8)


def test_split_is_as_fast_as_its_slower_stage() -> None:
    schedule = Schedule(placement="split", in_flight="stale_kv")
    trains_long = simulate(replace(BY_HAND, train_s=85.0), schedule, steps=30)
    assert trains_long.tokens_per_s == pytest.approx(20 / (85 + 15 + 3))
    # The update comes 1 s after the wave has ended, and loses what the next wave's first step has done by then.
    trains_briefly = replace(BY_HAND, train_s=1.0, train_s_per_token=0.0, publish_s=0.0)
    assert simulate(trains_briefly, schedule, steps=30).tokens_per_s == pytest.approx(20 / (19 + 1))


@pytest.mark.parametrize("max_staleness", [0, 4])
@pytest.mark.parametrize("placement", ["time_sliced", "split"])
def test_only_a_split_generates_beside_training(placement: Literal["time_sliced", "split"], max_staleness: int) -> None:
    schedule = Schedule(placement=placement, max_staleness=max_staleness)
    beside = simulate(UNEVEN, schedule, steps=20).tokens_beside_training
    assert (beside > 0) == (placement == "split" and max_staleness > 0)


@pytest.mark.parametrize("placement", ["time_sliced", "split"])
def test_the_bound_holds_for_every_schedule(placement: Literal["time_sliced", "split"]) -> None:
    for max_staleness, steps_per_slice in ((0, 1), (1, 2), (4, 1), (4, 2)):
        schedule = Schedule(placement=placement, max_staleness=max_staleness, steps_per_slice=steps_per_slice)
        outcome = simulate(UNEVEN, schedule, steps=15)
        assert len(outcome.rows) == 15
        assert lower_bound_s(UNEVEN, schedule, steps=15) < outcome.makespan_s
        assert max(float(row["staleness/max"] or 0) for row in outcome.rows) <= max_staleness


def test_the_bound_by_hand() -> None:
    """10 steps: 200 tokens and 400 prompt tokens. Three at once, of the 16 rollouts that the slots hold:
    200 (1/3 + 1/2) + 400 * .1 s; training 10 * 2 + 600 * .25 + 2 stalls of 5 s; 5 updates of 3 s."""
    shape = replace(BY_HAND, max_in_flight=3, stall_s=5.0, stall_every=4)
    in_turns = Schedule(steps_per_slice=2)
    assert lower_bound_s(shape, in_turns, steps=10) == pytest.approx(200 * 5 / 6 + 40 + 180 + 15)
    at_once = replace(in_turns, placement="split")
    assert lower_bound_s(shape, at_once, steps=10) == pytest.approx(200 * 5 / 6 + 40 + 15)
    # Without staleness there are slots for 4 rollouts, however many may be in flight.
    many = replace(shape, max_in_flight=100)
    assert lower_bound_s(many, Schedule(max_staleness=0), steps=10) == pytest.approx(200 * 0.75 + 40 + 180 + 30)


def test_a_seed_repeats_and_settles_the_lengths_for_every_schedule() -> None:
    def rows(seed: int, **schedule: Any) -> list[dict[str, Any]]:
        outcome = simulate(UNEVEN, Schedule(**schedule), steps=12, seed=seed)
        return [{key: value for key, value in row.items() if not key.startswith("memory/")} for row in outcome.rows]

    def trained(rows: list[dict[str, Any]]) -> int:
        return sum(row["tokens/trained"] for row in rows)

    assert rows(0) == rows(0)
    assert trained(rows(0)) == trained(rows(0, placement="split")) == trained(rows(0, max_staleness=0))
    assert trained(rows(0)) != trained(rows(1))


def test_lengths_are_log_normal_up_to_the_cut() -> None:
    shape = Shape(mean_tokens=100, sigma=1.0, max_new_tokens=10_000)
    lengths = np.array([shape.length(0, order, index) for order in range(2000) for index in range(2)])
    # Mean 100, standard deviation 100 sqrt(e - 1) = 131: a standard error of 2.1. Median 100 / sqrt(e) = 60.7.
    assert lengths.mean() == pytest.approx(100, abs=8)
    assert np.median(lengths) == pytest.approx(60.7, abs=5)
    assert np.log(lengths).std() == pytest.approx(1.0, abs=0.05)
    assert max(replace(shape, max_new_tokens=150).length(0, order, 0) for order in range(200)) == 150
    assert Shape(mean_tokens=7).length(0, 1, 2) == 7


def test_stages_alone_and_in_turns_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "STEPS", 20)
    assert throughput.alone(BY_HAND, Schedule()) == (pytest.approx(20 / 19), pytest.approx(20 / 17))
    row = throughput.efficiencies(BY_HAND, Schedule())
    assert row["time_sliced / limit"] == pytest.approx((19 + 17) / 39)
    assert row["split / slower"] == pytest.approx(row["split"] * 19 / 20)
    assert throughput.gain(BY_HAND, Schedule()) == pytest.approx(1.0)


def test_makespan_prints_a_line_for_every_shape_and_schedule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(makespan, "SHAPES", {"by hand": (BY_HAND, 4, 20)})
    makespan.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    # In turns nothing is lost; two steps per slice save every second update, in the bound as in the run.
    assert "time_sliced, max_staleness 4, steps_per_slice 1: P3 bound / time 1.000" in lines[0]
    assert "over synchronous 1.00" in lines[0]
    assert "time_sliced, max_staleness 4, steps_per_slice 2: P3 bound / time 1.000" in lines[1]
    assert f"over synchronous {39 / 37.5:.2f}" in lines[1]
