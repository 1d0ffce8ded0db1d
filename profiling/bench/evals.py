"""Time of the suite `arithmetic` through the loaded engine over lm-eval's own hf backend's. Goal <= .7.

Same model (the quickstart's, bfloat16), questions, prompts, samples and generation settings; the full distribution on
both sides. Loading a model is counted on neither, nor two questions of each task that come first. hf runs in a process
of its own and has its best time: over batch sizes, the fastest of them with OpenMP's threads spinning too, which may
help an idle machine and is ruinous on a busy one. Its "auto" is left out: it tries 64 sequences of the model's whole
length, gigabytes of logits, and ends at 64 at most, which is in the list. hf's samples have seeds of their own, so that
only times can be compared; `--parity` compares answers instead: greedy, in float32.

Run: python -m profiling.bench.evals [--parity] [--limit N]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from engine import clock, environment
from engine.config import Config, load

if TYPE_CHECKING:
    from evals.result import SuiteResult, TaskResult

GOAL = 0.7
BATCH_SIZES = (16, 64, 256)
_SUITE = "arithmetic"
_WARM_UP = 2

Found = TypeVar("Found")
Evaluated = Callable[[int], Awaitable["SuiteResult"]]


def hf_model(folder: Path, dtype: str, batch_size: int) -> Any:
    """lm-eval's own route, as `evals.run.run_suite` asks a model."""
    from lm_eval.models.huggingface import HFLM

    made: Any = HFLM  # its decorator hides what it takes
    model = made(str(folder), device="cpu", dtype=dtype, batch_size=batch_size)
    # What a model's author or transformers recommends (top_k = 50) is not what the engine samples from.
    model.model.generation_config.top_k = 0
    # hf does not tell which completions were cut.
    model.truncated = Counter()
    return model


def hf_seconds(folder: Path, batch_size: int, limit: int) -> float:
    """Of the whole suite at temperature 1."""
    from evals.run import run_suite
    from evals.suites import find

    model = hf_model(folder, "bfloat16", batch_size)
    run_suite(find(_SUITE), model, limit=_WARM_UP, temperature=1.0)
    started = time.monotonic()
    run_suite(find(_SUITE), model, limit=limit, temperature=1.0)
    return time.monotonic() - started


def on_engine(config: Config, folder: Path, temperature: float,
              measure: Callable[[Evaluated], Awaitable[Found]]) -> Found:
    """What `measure` makes of an engine as a run starts it; it is given what asks the suite's first N questions."""
    from engine.host import build_generator
    from engine.observe.terminal import SilentTerminal

    with tempfile.TemporaryDirectory() as work:
        generator = build_generator(config, folder, Path(work), SilentTerminal())
        return clock.run(_measured(generator, config, folder, Path(work), temperature, measure))


async def _measured(generator: Any, config: Config, folder: Path, work: Path, temperature: float,
                    measure: Callable[[Evaluated], Awaitable[Found]]) -> Found:
    from transformers import AutoTokenizer

    from engine.observe.terminal import SilentTerminal
    from engine.types import Version
    from evals.model import OnLoop
    from evals.run import Asked, evaluate_suite, settings_of
    from evals.suites import find

    await generator.open()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = OnLoop(generator, asyncio.get_running_loop(), config.run.stage_timeout_s)

    async def evaluated(limit: int) -> SuiteResult:
        asked = Asked(
            model=config.model.path, version=Version(number=0, digest="bench"), step=None,
            settings=settings_of(config, tokenizer, "vllm"), limit=limit, temperature=temperature,
            max_length=config.generate.max_model_len,
        )
        return await evaluate_suite(find(_SUITE), asked, engine, tokenizer, work, SilentTerminal())

    await evaluated(_WARM_UP)
    found = await measure(evaluated)
    await generator.close()
    return found


def same_answers(ours: Mapping[str, TaskResult], theirs: Mapping[str, TaskResult]) -> dict[str, tuple[int, int]]:
    """By task: how many questions have the same answers, and of how many, after the same prompts."""
    counts: dict[str, tuple[int, int]] = {}
    for name, task in ours.items():
        pairs = list(zip(task.questions, theirs[name].questions, strict=True))
        assert all(one.prompt == other.prompt for one, other in pairs)
        counts[name] = sum(one.answers == other.answers for one, other in pairs), len(pairs)
    return counts


def parity(limit: int) -> None:
    from engine.train.model import materialise
    from evals.run import run_suite
    from evals.suites import find
    from profiling.bench.setup import CONFIG

    config = load(CONFIG, ["model.dtype=float32"])
    folder = materialise(config.model.path)
    ours = on_engine(config, folder, 0.0, lambda evaluated: evaluated(limit)).tasks
    theirs = run_suite(find(_SUITE), hf_model(folder, "float32", 64), limit=limit, temperature=0.0)
    for name, (same, of) in same_answers(ours, theirs).items():
        print(f"{name}: {same} of {of} greedy answers are the same in float32")


def times(limit: int, outside: Mapping[str, str]) -> None:
    """Ours before each of hf's, least over least: what else the machine does hits both."""
    from engine.train.model import materialise
    from profiling.bench.setup import quickstart

    ours: list[float] = []

    async def alternate(evaluated: Evaluated) -> dict[int, float]:
        async def theirs(batch_size: int, variables: Mapping[str, str]) -> float:
            ours.append((await evaluated(limit)).seconds)
            print(f"loaded engine: {ours[-1]:.1f} s", flush=True)
            return await asyncio.to_thread(_in_a_process, batch_size, limit, variables)

        found = {batch_size: await theirs(batch_size, os.environ) for batch_size in BATCH_SIZES}
        fastest = min(found, key=found.__getitem__)
        return {fastest: min(found[fastest], await theirs(fastest, outside))}

    config = quickstart()
    ((fastest, least),) = on_engine(config, materialise(config.model.path), 1.0, alternate).items()
    print(f"ratio {min(ours) / least:.2f} (goal <= {GOAL}), hf at batch size {fastest}")


def _in_a_process(batch_size: int, limit: int, variables: Mapping[str, str]) -> float:
    command = [sys.executable, "-m", "profiling.bench.evals", "--limit", str(limit), "--hf", str(batch_size)]
    said = subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE).stdout
    seconds = float(said.splitlines()[-1])
    spinning = "" if "GOMP_SPINCOUNT" in variables else ", OpenMP as it comes"
    print(f"hf, batch size {batch_size}{spinning}: {seconds:.1f} s", flush=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m profiling.bench.evals")
    parser.add_argument("--parity", action="store_true", help="compare greedy answers in float32, and no times")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="the first N questions of each task")
    parser.add_argument("--hf", type=int, default=0, metavar="BATCH", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hf:
        from engine.train.model import materialise
        from profiling.bench.setup import quickstart

        print(hf_seconds(materialise(quickstart().model.path), arguments.hf, arguments.limit))
        return
    outside = dict(os.environ)
    environment.prepare()
    if arguments.parity:
        parity(arguments.limit)
    else:
        times(arguments.limit, outside)


if __name__ == "__main__":
    main()
