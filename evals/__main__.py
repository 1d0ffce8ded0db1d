"""python -m evals list | run --suite S --checkpoint PATH | compare A.json B.json | plot RUN"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine import clock, environment
from engine.config import AlgorithmSection, Config, load
from engine.errors import DataError, FarfieldError, report
from engine.types import Version
from evals.suites import Suite, find, listing

_DEFAULTS = Path(__file__).with_name("default.toml")
# An evaluation has the whole host and trains nothing: what only training needs must not stand in the way.
_WHOLE_HOST = (
    "schedule.placement=time_sliced", "schedule.cores=", "schedule.max_staleness=1", "schedule.steps_per_slice=1",
    "schedule.in_flight=recompute", "train.micro_batch_tokens=1000000000", "generate.backend=vllm",
    "generate.replay_from=", "generate.max_new_tokens=1", "evals.every=0",
)

# What a server does not tell.
_AS_SERVED = {"dtype": "as served", "lm_head_dtype": "as served"}


def main() -> int:
    """Exit codes as those of launch.py."""
    arguments = _parse()
    sys.path.append(str(Path.cwd()))
    environment.prepare()
    try:
        match arguments.command:
            case "list":
                _list(arguments.include_path)
            case "run":
                _run(arguments)
            case "compare":
                from evals.compare import main_compare

                main_compare(arguments.first, arguments.second)
            case _:
                from evals.plot import main_plot

                main_plot(arguments.run)
    except FarfieldError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted: the same command goes on where this one stopped", file=sys.stderr)
        return 1
    except Exception as error:
        return report(error)
    finally:
        environment.end_children()
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m evals", description="Evaluate checkpoints and compare results.")
    commands = parser.add_subparsers(dest="command", required=True)
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--include-path", type=Path, metavar="D", help="a folder with lm-eval task files of your own")
    commands.add_parser("list", parents=[own], help="the suites")
    run = commands.add_parser("run", parents=[own], help="ask a checkpoint a suite's questions")
    run.add_argument("--suite", required=True, metavar="S", help="see `list`; or a folder of lm-eval task files")
    run.add_argument("--checkpoint", required=True, metavar="PATH",
                     help="a checkpoint, a run folder (its latest one), an HF folder, an alias or a hub id")
    run.add_argument("--limit", metavar="N", help="the first N questions of each task; 0: all")
    run.add_argument("--temperature", metavar="T", help="of tasks that sample; 0: greedy, once")
    run.add_argument("--out", type=Path, metavar="F", help="the result's file")
    run.add_argument("--base-url", metavar="U", help="ask a server that serves the checkpoint: http://HOST:PORT/v1")
    run.add_argument("overrides", nargs="*", metavar="section.key=value", help="such as generate.max_model_len=4096")
    compare = commands.add_parser("compare", help="is the second better than the first?")
    compare.add_argument("first", type=Path, metavar="A.json")
    compare.add_argument("second", type=Path, metavar="B.json")
    plot = commands.add_parser("plot", help="a run's evaluations over its steps")
    plot.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    return parser.parse_args()


class Checkpoint(msgspec.Struct, frozen=True):
    """What `--checkpoint` names: a model for `model.path`, and the run that it lies in, if it does."""

    model: str
    run: Path | None = None
    step: int | None = None

    @classmethod
    def of(cls, named: str) -> Checkpoint:
        """Raises:
            DataError: a run folder without a checkpoint.
        """
        path = Path(named).expanduser()
        if (path / "metrics.jsonl").exists():
            path = path / "checkpoints" / "latest"
            if not path.exists():
                raise DataError(f"{named} has no checkpoint", remedy="name a run that has saved one")
        if not path.is_dir():
            return cls(named)
        path = path.resolve()
        step, run = re.fullmatch(r"step-(\d+)", path.name), path.parent.parent
        if step and (run / "config.toml").exists():
            return cls(str(path), run, int(step[1]))
        return cls(str(path))

    def config(self, overrides: Sequence[str]) -> Config:
        """The run's own settings, so that results compare with those made during training."""
        source = self.run / "config.toml" if self.run else _DEFAULTS
        config = load(source, [*_WHOLE_HOST, f"model.path={self.model}", *overrides])
        return msgspec.structs.replace(config, algorithm=AlgorithmSection())  # supervised steps have no engine

    def number(self) -> int:
        """Of its version: a step that changed no weights makes none. 0 outside a run."""
        lines = (self.run / "events.jsonl").read_bytes().splitlines() if self.run else []
        events = [msgspec.json.decode(line) for line in lines]
        saved = [event["version"] for event in events if event["kind"] == "checkpoint" and event["step"] == self.step]
        return saved[-1] if saved else 0

    def out(self, suite: Suite) -> Path:
        """Where a run would have put the result, else in the current folder."""
        if self.run:
            return self.run / "evals" / f"step-{self.step:06d}" / f"{suite.stem}.json"
        return Path(f"{suite.stem}-{re.sub(r'[^A-Za-z0-9._-]+', '-', Path(self.model).name)}.json")


def _run(arguments: argparse.Namespace) -> None:
    checkpoint = Checkpoint.of(arguments.checkpoint)
    given = {"evals.limit": arguments.limit, "evals.temperature": arguments.temperature}
    config = checkpoint.config([
        *arguments.overrides, *(f"{key}={value}" for key, value in given.items() if value is not None)
    ])
    suite = find(arguments.suite, arguments.include_path)
    out = arguments.out or checkpoint.out(suite)
    if out.exists():
        raise DataError(f"{out} is there already", remedy="remove it, or name another file with --out")
    suite.load()  # what is wrong with it is said before an engine starts
    if arguments.base_url:
        _on_server(arguments.base_url, checkpoint, config, suite, out)
    else:
        _on_engine(checkpoint, config, suite, out)
    print(out)


def _on_engine(checkpoint: Checkpoint, config: Config, suite: Suite, out: Path) -> None:
    import torch

    from engine.host import build_generator
    from engine.observe.terminal import open_terminal
    from engine.rollout.chat import open_chat
    from engine.train.model import materialise
    from engine.weights.digest import folder_digest
    from evals.during import evaluate_and_tell

    folder = materialise(config.model.path)
    chat = open_chat(config, folder)
    version = Version(number=checkpoint.number(), digest=folder_digest(folder, getattr(torch, config.engine_dtype)))
    terminal = open_terminal("plain", steps=1, title="evals")
    # Kept if anything fails: the engine's log is in it.
    scratch = Path(tempfile.mkdtemp(prefix="farfield-evals-"))
    generator = build_generator(config, folder, scratch, terminal)

    async def asking() -> None:
        try:
            await generator.open()
            async with asyncio.TaskGroup() as engine:
                watching = engine.create_task(generator.watch())
                await evaluate_and_tell(suite, generator, chat, config, version, checkpoint.step, out, terminal)
                watching.cancel()
        finally:
            await generator.close()

    clock.run(asking())
    shutil.rmtree(scratch)


def _on_server(url: str, checkpoint: Checkpoint, config: Config, suite: Suite, out: Path) -> None:
    from engine.observe.terminal import open_terminal
    from engine.rollout.chat import open_chat
    from engine.train.model import end_token_ids, materialise
    from evals.during import tell
    from evals.run import Asked, evaluate_suite, settings_of
    from evals.server import ServerEngine

    folder = materialise(config.model.path)
    chat = open_chat(config, folder)
    engine = ServerEngine(url, end_token_ids=end_token_ids(folder), limit_s=config.run.stage_timeout_s,
                          at_once=config.generate.max_in_flight)
    fits = config.generate.max_model_len
    asked = Asked(model=engine.model_name, version=engine.version, step=checkpoint.step,
                  settings=settings_of(config, chat.tokenizer, "server") | _AS_SERVED,
                  limit=config.evals.limit, temperature=config.evals.temperature,
                  max_length=min(fits, engine.max_length or fits))
    terminal = open_terminal("plain", steps=1, title="evals")
    tell(clock.run(evaluate_suite(suite, asked, engine, chat.tokenizer, out, terminal)), terminal)


def _list(include_path: Path | None) -> None:
    for suite in listing(include_path):
        questions = "" if suite.questions is None else f", {suite.questions} questions"
        print(f"{suite.name}: {suite.about}\n  {', '.join(suite.tasks)}{questions}"
              f"{'' if suite.offline else ' (needs the hub)'}")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # vLLM leaves threads that would hold the interpreter up.
    os._exit(code)
