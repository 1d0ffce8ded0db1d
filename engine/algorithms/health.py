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
    known = {name: value for name, value in metrics.items() if name in BANDS and value is not None}
    return {name: word for name, value in known.items() if (word := verdict(name, value)) is not None}


def verdict(name: str, value: float) -> Verdict | None:
    """How the metric `name` stands at `value`; None for a metric without a band. A NaN is bad."""
    if name not in BANDS:
        return None
    healthy, bad, falls = BANDS[name]
    sign, size = -1 if falls else 1, abs(value)
    if sign * size <= sign * healthy:
        return "healthy"
    return "watch" if sign * size <= sign * bad else "bad"
