"""How cores and devices are divided between generator and trainer."""

from __future__ import annotations

import pytest

from engine.environment import divide_cores, engine_devices
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("available", "cores", "generator", "trainer"),
    [
        ({0, 1}, "", [0], [1]),
        ({7, 3, 5}, "", [3], [5, 7]),
        (range(8), "", [0, 1, 2, 3], [4, 5, 6, 7]),
        (range(8), "0-3", [0, 1, 2, 3], [4, 5, 6, 7]),
        (range(4), "2,0", [0, 2], [1, 3]),
        (range(6), "0,3-4,4", [0, 3, 4], [1, 2, 5]),
        ({4, 5}, "5", [5], [4]),
    ],
)
def test_cores_are_divided(available, cores, generator, trainer):
    assert divide_cores(available, cores) == (generator, trainer)


@pytest.mark.parametrize(
    ("available", "cores", "limit"),
    [
        ({0}, "", "leaves one side none of 1 cores"),
        ({0, 1}, "0-1", "leaves one side none of 2 cores"),
        ({0, 1}, "1-0", "leaves one side none of 2 cores"),
        ({0, 1}, "2", "not there"),
        ({0, 1}, "0-99999999999999", "not there"),
        ({0, 2}, "0-2", "not there"),
        ({0, 1}, "a", "no list of cores"),
        ({0, 1}, "0,", "no list of cores"),
        ({0, 1}, "-1", "no list of cores"),
    ],
)
def test_what_cannot_be_divided_is_refused(available, cores, limit):
    with pytest.raises(ConfigError, match=limit) as refused:
        divide_cores(available, cores)
    assert refused.value.path == "schedule.cores"
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("visible", "count", "first", "engine"),
    [(None, 4, 2, "2,3"), ("4,5,6,7", 4, 1, "5,6,7"), ("GPU-a,GPU-b", 2, 1, "GPU-b")],
)
def test_the_engine_sees_the_devices_after_the_trainers(visible, count, first, engine):
    assert engine_devices(visible, count, first) == engine
