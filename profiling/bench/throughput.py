"""P2, in simulated time: how near each placement comes to what its stages could do without one another.

`split`: steady throughput over that of the slower stage alone. The generator alone has a trainer that costs nothing, no
weight updates, and keeps its cache; the trainer alone has a generator that costs nothing; admission is the same.
`time_sliced`: over 1 / (1/g + 1/t), what two such stages could do in turns. Then what is gained over max_staleness 0,
whose whole step is in flight at once so that its batches are no smaller.

The machine is `profiling.simulate.Shape`'s, steps have 256 completions with a mean of 128 tokens. Generation-bound,
training-bound and balanced: training takes .45, 1.6 and 1.05 of the generator's time. Heavy tail: as balanced, lengths
log-normal with sigma 1.5 and cut at 8 means; the others have sigma .5. Bursty: training takes .85, and every tenth step
stalls for as long as the generator needs for a whole step.

Run: python -m profiling.bench.throughput
"""

from __future__ import annotations

from msgspec.structs import replace

from profiling.simulate import Schedule, Shape, simulate

GOAL = 0.95
STEPS = 32
_BALANCED = Shape(sigma=0.5, train_s_per_token=0.00217)
SHAPES = {
    "generation-bound": replace(_BALANCED, train_s_per_token=0.0009),
    "training-bound": replace(_BALANCED, train_s_per_token=0.0033),
    "balanced": _BALANCED,
    "heavy tail": replace(_BALANCED, sigma=1.5),
    "bursty": replace(_BALANCED, train_s_per_token=0.0018, stall_s=100.0, stall_every=10),
}


def alone(shape: Shape, schedule: Schedule) -> tuple[float, float]:
    """Trained tokens per second of the generator and of the trainer, when the other stage costs nothing."""
    undisturbed = replace(schedule, placement="split", in_flight="stale_kv")
    generator = replace(shape, train_s=0.0, train_s_per_token=0.0, stall_s=0.0, publish_s=0.0)
    trainer = replace(shape, step_s=0.0, step_s_per_sequence=0.0, prefill_s_per_token=0.0, publish_s=0.0)
    return (
        simulate(generator, undisturbed, steps=STEPS).tokens_per_s,
        simulate(trainer, undisturbed, steps=STEPS).tokens_per_s,
    )


def efficiencies(shape: Shape, schedule: Schedule) -> dict[str, float]:
    """One row of the table."""
    generator, trainer = alone(shape, schedule)
    split = simulate(shape, replace(schedule, placement="split"), steps=STEPS).tokens_per_s
    in_turns = simulate(shape, replace(schedule, placement="time_sliced"), steps=STEPS).tokens_per_s
    return {
        "generator alone": generator,
        "trainer alone": trainer,
        "split": split,
        "split / slower": split / min(generator, trainer),
        "time_sliced": in_turns,
        "time_sliced / limit": in_turns * (1 / generator + 1 / trainer),
    }


def gain(shape: Shape, schedule: Schedule) -> float:
    """Steady throughput of `time_sliced` over the same at max_staleness 0."""
    whole_wave = replace(shape, max_in_flight=shape.groups_per_step * shape.group_size)
    synchronous = simulate(whole_wave, Schedule(max_staleness=0), steps=STEPS)
    return simulate(shape, schedule, steps=STEPS).tokens_per_s / synchronous.tokens_per_s


def main() -> None:
    for schedule in (Schedule(steps_per_slice=1), Schedule(steps_per_slice=2)):
        setting = f"max_staleness {schedule.max_staleness}, steps_per_slice {schedule.steps_per_slice}"
        print(f"tokens/s at {setting} (ratios: goal >= {GOAL})")
        for name, shape in SHAPES.items():
            row = efficiencies(shape, schedule)
            cells = (f"{key} {value:.3f}" if "/" in key else f"{key} {value:.0f}" for key, value in row.items())
            print(f"  {name:18}{', '.join(cells)}", flush=True)
        for groups in (8, 32):
            shape = Shape(sigma=1.0, groups_per_step=groups)
            print(f"  time_sliced over max_staleness 0, sigma 1, {8 * groups} completions a step: "
                  f"{gain(shape, schedule):.2f}", flush=True)


if __name__ == "__main__":
    main()
