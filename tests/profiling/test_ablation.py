"""What an ablation makes of its runs, by hand; no run is made here."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hand_made import config

from engine.config import load
from profiling.bench.ablation import CONFIG, STUDIES, Outcome, _outcome, curves, interval, table


def outcome(variant: str, seed: int, after: float, last: float = 0.5, reached: int | None = None) -> Outcome:
    return Outcome(variant, seed, (), [0.0] * 5 + [last] * 10, 0.25, after, reached, 60.0)


def test_an_interval_is_students() -> None:
    """Mean 2, sample deviation 1: 4.303 / sqrt(3) by a published table of t with 2 degrees of freedom."""
    mean, half = interval([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(2.4843, abs=1e-4))
    assert math.isnan(interval([1.0])[1])
    # 12 values, 11 degrees: the point of 9 degrees, which is the wider one.
    assert interval([0.0, 1.0] * 6)[1] == pytest.approx(2.262 * math.sqrt(3 / 11) / math.sqrt(12), abs=1e-6)


def test_differences_are_paired_by_seed() -> None:
    """a: .5 .7 .9, b: .6 .8 (no third seed): the difference is .1 twice, whatever a's spread is."""
    made = [outcome("a", seed, after) for seed, after in enumerate((0.5, 0.7, 0.9))]
    made += [outcome("b", seed, after, last=0.75, reached=40 + seed) for seed, after in enumerate((0.6, 0.8))]
    _, _, first, second = table(["a", "b", "not run yet"], made).splitlines()
    assert [cell.strip() for cell in first.split("|")[1:-1]] == [
        "a", "3", "0.500 ± 0.000", "0.700 ± 0.497", "", "never", "0", "0", "0",
    ]  # fmt: skip
    cells = [cell.strip() for cell in second.split("|")[1:-1]]
    assert (cells[0], cells[1], cells[2], cells[4]) == ("b", "2", "0.750 ± 0.000", "0.100 ± 0.000")
    assert cells[5] == "41 (2 of 2 runs)"


def test_a_curve_has_a_point_for_every_20_steps() -> None:
    """Two seeds, 25 steps: .25 and .75 at first, .5 and 1 in the five that are left; 12.706 * .3536 / sqrt(2)."""
    made = [Outcome("a", seed, (), [first] * 20 + [last] * 5, 0.0, 0.0, None, 60.0)
            for seed, (first, last) in enumerate([(0.25, 0.5), (0.75, 1.0)])]
    *_, row = curves(["a", "not run yet"], made).splitlines()
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["a", "0.500 ± 3.176", "0.750 ± 3.176"]


def test_an_outcome_is_read_from_the_runs_files(tmp_path: Path) -> None:
    rewards = [0.5, 0.75, 0.75, 0.75, 0.75, 1.0, 1.0]  # steps 2 to 6 are the first five with a mean of .8
    rows = "".join(
        json.dumps({"reward/mean": reward, "staleness/max": min(step, 4), "mismatch/k3": step / 8, "mismatch/ess": 0.5})
        + "\n"
        for step, reward in enumerate(rewards)
    )
    (tmp_path / "metrics.jsonl").write_text(rows)
    for step, mean in ((0, 0.25), (7, 0.75)):
        folder = tmp_path / "evals" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "held_out.json").write_text(json.dumps({"sums": {"sampled": {"mean": mean}}}))
    made = _outcome(tmp_path, config(run={"steps": 7}), "a", 3, ("train.lr=1e-3",), 61.0)
    assert made == Outcome("a", 3, ("train.lr=1e-3",), rewards, 0.25, 0.75, 6, 61.0, 4, 0.625, 0.5)
    assert made.last == pytest.approx(5.5 / 7)


@pytest.mark.parametrize("study", STUDIES)
def test_every_variant_is_a_configuration(study: str) -> None:
    for variant in STUDIES[study].values():
        assert load(CONFIG, variant.overrides).model.path == "petri"
