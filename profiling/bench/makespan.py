"""P3, in simulated time: the trace's lower bound over the time that the engine's own loop takes for it.

The machine is `profiling.simulate.Shape`'s, whose `lower_bound_s` says what the bound is. The whole run counts, filling
and emptying of the pipeline included. Lengths are log-normal with sigma 1. "over synchronous" is the throughput over
that of max_staleness 0 in turns, whose whole step is in flight at once; `split` is given a device for each stage here,
twice the hardware.

The goal is for steps of 256 completions. The others show where asynchrony gains little, or what it costs: see
docs/when-async.md. `accelerator` is no measurement but an assumption, for the other end: a decode step of 12 ms at
nearly any batch (reading the weights is all), prefill and training at 100,000 and 33,000 tokens/s, completions of 512
tokens on average.

Run: python -m profiling.bench.makespan
"""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from profiling.simulate import Schedule, Shape, lower_bound_s, simulate

GOAL = 0.95
_HERE = Shape(sigma=1.0)
_SMALL = replace(_HERE, groups_per_step=8)
_ACCELERATOR = Shape(
    sigma=1.0, mean_tokens=512, max_new_tokens=4096, max_in_flight=256, step_s=0.012, step_s_per_sequence=2e-5,
    prefill_s_per_token=1e-5, train_s=0.1, train_s_per_token=3e-5, publish_s=0.05,
)
SHAPES = {
    "256 a step": (_HERE, 4, 120),
    "64 a step": (_SMALL, 4, 60),
    "short and alike": (replace(_SMALL, mean_tokens=24, sigma=0.0), 4, 60),
    "training-bound": (replace(_SMALL, train_s_per_token=0.009), 4, 60),
    "long prompts": (replace(_SMALL, prompt_tokens=512, mean_tokens=64), 4, 60),
    "slow hand-over": (replace(_SMALL, sleep_s=20.0), 4, 60),
    "accelerator": (_ACCELERATOR, 4, 40),
    "accelerator, more stale": (_ACCELERATOR, 16, 40),
}
"""What runs, at which max_staleness, for how many steps."""
SETTINGS: tuple[tuple[Literal["time_sliced", "split"], int], ...] = (
    ("time_sliced", 1), ("time_sliced", 2), ("split", 1), ("split", 2),
)
"""Placement and steps_per_slice."""


def synchronous_s(shape: Shape, steps: int) -> float:
    """How long the plain loop takes: the same in every placement."""
    whole_wave = replace(shape, max_in_flight=shape.groups_per_step * shape.group_size)
    return simulate(whole_wave, Schedule(max_staleness=0), steps=steps).makespan_s


def main() -> None:
    for name, (shape, max_staleness, steps) in SHAPES.items():
        plain_s = synchronous_s(shape, steps)
        for placement, steps_per_slice in SETTINGS:
            schedule = Schedule(
                placement=placement, max_staleness=max_staleness, steps_per_slice=steps_per_slice
            )
            outcome = simulate(shape, schedule, steps=steps)
            bound_s = lower_bound_s(shape, schedule, steps=steps)
            print(
                f"{name}, {schedule.placement}, max_staleness {schedule.max_staleness}, "
                f"steps_per_slice {schedule.steps_per_slice}: P3 bound / time {bound_s / outcome.makespan_s:.3f} "
                f"(goal >= {GOAL}), over synchronous {plain_s / outcome.makespan_s:.2f}, staleness mean "
                f"{outcome.total('staleness/mean') / len(outcome.steady):.1f} max "
                f"{max(float(row['staleness/max'] or 0) for row in outcome.rows):.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
