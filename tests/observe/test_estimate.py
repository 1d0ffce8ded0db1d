"""Intervals by hand."""

from __future__ import annotations

import numpy as np
import pytest

from engine.observe.estimate import estimate


def test_a_share_has_a_wilson_interval() -> None:
    # 10 of 40, z = 1.96: (0.25 + 0.04802) / 1.09604 -+ 0.14150 / 1.09604
    value = estimate([1.0] * 10 + [0.0] * 30)
    assert value.mean == 0.25
    assert (value.low, value.high) == (pytest.approx(0.1419, abs=1e-4), pytest.approx(0.4019, abs=1e-4))
    assert estimate([0.0] * 128).high == pytest.approx(0.0291, abs=1e-4)


def test_a_mean_has_a_normal_interval() -> None:
    value = estimate([0.0, 0.5, 0.5, 1.0])
    half = 1.96 * np.std([0.0, 0.5, 0.5, 1.0], ddof=1) / 2
    assert (value.mean, value.low, value.high) == (0.5, pytest.approx(0.5 - half), pytest.approx(0.5 + half))


def test_equal_values_are_not_certain() -> None:
    # z^2 = 3.8416: (0.5 + 1.9208) / 4.8416 -+ 1.96 * sqrt(0.25 + 0.9604) / 4.8416
    value = estimate([0.5])
    assert (value.low, value.high) == (pytest.approx(0.0546, abs=1e-4), pytest.approx(0.9454, abs=1e-4))
    # (0.5 + 0.9604) / 2.9208 -+ 1.96 * sqrt(0.125 + 0.2401) / 2.9208
    value = estimate([0.5, 0.5])
    assert (value.low, value.high) == (pytest.approx(0.0945, abs=1e-4), pytest.approx(0.9055, abs=1e-4))
