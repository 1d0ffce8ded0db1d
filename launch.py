"""torchrun --nproc-per-node 1 launch.py --config configs/X.toml [section.key=value ...] [--dry-run | --preview N]"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from engine import environment
from engine.config import Config, load
from engine.errors import ConfigError, FarfieldError, report


def main() -> int:
    """Parse, check, run. Exit codes: 0 done, 2 bad config or arguments, 3 something is missing, 1 anything else."""
    arguments = _parse()
    # For modules of the user's own.
    sys.path.append(str(Path.cwd()))
    environment.prepare()
    if int(os.environ.get("RANK", "0")):
        return _follow(arguments)
    try:
        config = load(arguments.config, arguments.overrides)
        _refuse_unbuilt(arguments)
        _refuse_missing_ranks(config)
        # Until the event loop answers them. An exception here would have to find its way through vLLM's start.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _stop_before_the_first_step)
        return _run(config, arguments)
    except FarfieldError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _follow(arguments: argparse.Namespace) -> int:
    """A rank above 0: it trains what the learner sends, and has nothing to do where nothing is trained."""
    if arguments.dry_run or arguments.preview is not None:
        return 0
    from engine.train.rank import World, serve_rank

    return serve_rank(World.from_environment())


def _stop_before_the_first_step(number: int, frame: object) -> None:
    print("stopped before the first step; there was nothing to save", file=sys.stderr, flush=True)
    environment.end_children()
    os._exit(0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launch.py", description="Train a language model by reinforcement learning.")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="such as configs/quickstart.toml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a key of the file")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--dry-run", action="store_true", help="print the resolved plan and exit")
    mode.add_argument("--preview", type=int, metavar="N", help="show N prompts with samples and rewards, train nothing")
    parser.add_argument("--role", choices=["learner", "rollout"], default="learner")
    parser.add_argument("--join", metavar="tcp://HOST:PORT")
    return parser.parse_intermixed_args()


def _refuse_unbuilt(arguments: argparse.Namespace) -> None:
    if arguments.role != "learner":
        raise ConfigError("--role", value=arguments.role, limit="not built yet", remedy="start without --role")
    if arguments.join:
        raise ConfigError("--join", value=arguments.join, limit="not built yet", remedy="start without --join")
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if hosts > 1:
        raise ConfigError("--nnodes", value=hosts, limit="not built yet", remedy="use --nnodes 1")
    if arguments.preview is not None and arguments.preview < 1:
        raise ConfigError("--preview", value=arguments.preview, limit="is below 1", remedy="ask for one at least")


def _refuse_missing_ranks(config: Config) -> None:
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if config.train.ranks > size:
        raise ConfigError("train.ranks", value=config.train.ranks, limit=f"torchrun started {size}",
                          remedy=f"start with --nproc-per-node {config.train.ranks}, or lower train.ranks")


def _dry_run(config: Config) -> int:
    import msgspec

    schedule, generate = config.schedule, config.generate
    groups, rollouts = schedule.groups_per_step, schedule.groups_per_step * generate.group_size
    print(msgspec.toml.encode(config).decode())
    if config.algorithm.preset == "ce":
        print(f"# {config.run.steps} steps of {groups} chats")
        return 0
    print(f"# {config.run.steps} steps of {groups} groups x {generate.group_size} = {rollouts} rollouts")
    print(f"# up to {rollouts * generate.max_new_tokens} new tokens a step; staleness at most {schedule.max_staleness}")
    return 0


def _run(config: Config, arguments: argparse.Namespace) -> int:
    from engine.algorithms.presets import resolve
    from engine.reward.pool import ScoringPool
    from engine.tasks.source import TaskSource
    from evals.suites import named
    from evals.suites.questions import reserved

    # Before the heavy imports: what is wrong with the loss, tasks or scorers is said at once.
    if resolve(config.algorithm).ratio == "none" and config.algorithm.preset != "ce":
        print("warning: algorithm.ratio = 'none' is the uncorrected baseline of studies", file=sys.stderr)
    tasks = TaskSource(config.tasks, config.run.seed, reserved(config.tasks))
    scorer = ScoringPool(config.tasks, config.reward, config.generate.max_new_tokens)
    suites = named(config.evals.suites)
    if arguments.dry_run:
        return _dry_run(config)
    if arguments.preview is not None and config.algorithm.preset == "ce":
        raise ConfigError("--preview", value=arguments.preview, limit="supervised steps sample nothing to show",
                          remedy="start without it")
    try:
        if arguments.preview is not None:
            from engine.preview import run_preview

            run_preview(config, tasks, scorer, arguments.preview)
        else:
            from engine.host import run_host
            from engine.train.offload import require_device
            from engine.train.rank import World
            from evals.during import evaluate

            require_device(config.train)
            for suite in suites if config.evals.every else ():
                suite.load()  # what it lacks is said before the engine starts
            run_host(config, arguments.config.stem, tasks, scorer, evaluate, World.from_environment())
        return 0
    except FarfieldError:
        raise
    except Exception as error:
        return report(error)
    finally:
        environment.end_children()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
