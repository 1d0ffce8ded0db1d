"""Verdicts at the bands' edges, by hand."""

from __future__ import annotations

import math

import pytest

from engine.algorithms.health import BANDS, Verdict, verdict, verdicts
from engine.observe.metrics import KEYS


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("mismatch/prob_diff", 0.004, "healthy"),
        ("mismatch/prob_diff", 0.007, "watch"),
        ("mismatch/prob_diff", 0.011, "bad"),
        ("mismatch/ess", 0.31, "healthy"),
        ("mismatch/ess", 0.29, "bad"),
        ("mismatch/k1", 0.09, "healthy"),
        ("mismatch/k1", -0.09, "healthy"),
        ("mismatch/k1", -0.11, "bad"),
        ("mismatch/k3", 9e-4, "healthy"),
        ("mismatch/k3", 5e-3, "watch"),
        ("mismatch/k3", 2e-2, "bad"),
        ("mismatch/chi2", 1.1, "bad"),
        ("rule/fraction", 0.3, "watch"),
        ("mismatch/ess", math.nan, "bad"),
        ("mismatch/k3", math.nan, "bad"),
        ("mismatch/chi2", math.inf, "bad"),
    ],
)
def test_a_verdict(name: str, value: float, expected: Verdict) -> None:
    assert verdict(name, value) == expected


def test_verdicts_are_of_what_has_a_band_and_a_value() -> None:
    row = {"loss": 1e9, "mismatch/ess": None, "mismatch/k1": -0.2, "mismatch/chi2": 0.5}
    assert verdicts(row) == {"mismatch/k1": "bad", "mismatch/chi2": "healthy"}


def test_every_band_is_of_a_metric() -> None:
    assert BANDS.keys() <= {key.name for key in KEYS}
