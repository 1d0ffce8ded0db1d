"""What a mismatch metric's value says: one table of bands, one verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Verdict = Literal["healthy", "watch", "bad"]


class Band(NamedTuple):
    """Healthy up to `healthy` and bad beyond `bad`, in size; the other way round when `falls`: lower is worse."""

    healthy: float
    bad: float
    falls: bool = False


BANDS: dict[str, Band] = {
    "mismatch/k1": Band(0.1, 0.1),
    "mismatch/k3": Band(1e-3, 1e-2),
    "mismatch/ess": Band(0.3, 0.3, falls=True),
    "mismatch/chi2": Band(1.0, 1.0),
    "mismatch/prob_diff": Band(0.005, 0.01),
    "rule/fraction": Band(0.2, 0.5),
}


def verdicts(metrics: Mapping[str, float | None]) -> dict[str, Verdict]:
    """The verdict on every metric that has a band and a value."""
    return {name: verdict(name, value) for name in BANDS if (value := metrics.get(name)) is not None}


def verdict(name: str, value: float) -> Verdict:
    """How the metric `name`, which has a band, stands at `value`. A NaN is bad."""
    healthy, bad, falls = BANDS[name]
    sign, size = -1 if falls else 1, abs(value)
    if sign * size <= sign * healthy:
        return "healthy"
    return "watch" if sign * size <= sign * bad else "bad"
