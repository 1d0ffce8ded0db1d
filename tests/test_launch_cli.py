"""The command line, as a user meets it: exit codes, one message naming what is wrong, and no wait for torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHIPPED = sorted((ROOT / "configs").glob("*.toml"))
HEAVY = {"torch", "vllm", "transformers"}

# The message comes before the heavy imports, which are most of a start: so it comes at once.
SCRIPT = f"""
import sys
import launch
sys.argv[0] = "launch.py"
code = launch.main()
assert not {HEAVY} & set(sys.modules)
sys.exit(code)
"""


def launch(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=ROOT,
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=120,
    )


def assert_refused(done: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    """One message on stderr, with a remedy, and nothing else anywhere."""
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("error:") == 1
    assert "\n  -> " in done.stderr
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


@pytest.mark.parametrize("config", SHIPPED, ids=lambda path: path.name)
def test_a_dry_run_prints_the_plan_of_every_shipped_config(config: Path) -> None:
    done = launch("--config", str(config.relative_to(ROOT)), "--dry-run", "run.steps=7")
    assert (done.returncode, done.stderr) == (0, "")
    assert tomllib.loads(done.stdout)["run"]["steps"] == 7
    assert "# 7 steps of " in done.stdout


def test_an_uncorrected_loss_is_warned_of_and_a_supervised_one_is_not() -> None:
    dry = ("--config", "configs/quickstart.toml", "--dry-run")
    baseline = launch(*dry, "algorithm.ratio=none")
    assert baseline.returncode == 0
    assert baseline.stderr == "warning: algorithm.ratio = 'none' is the uncorrected baseline of studies\n"
    supervised = launch("--config", "configs/sft.toml", "--dry-run")
    assert (supervised.returncode, supervised.stderr) == (0, "")
    assert supervised.stdout.endswith("# 20 steps of 16 chats\n")


@pytest.mark.parametrize(
    ("overrides", "code", "parts"),
    [
        (["train.lrr=1"], 2, ["train.lrr = 1", "is not a key", "did you mean train.lr?"]),
        (["shedule.max_staleness=0"], 2, ["shedule = {'max_staleness': 0}", "is not a key", "did you mean schedule?"]),
        (["run.steps=0"], 2, ["run.steps = 0", ">= 1", "write"]),
        (["run.steps=many"], 2, ["run.steps = 'many'", "a whole number"]),
        (["algorithm.preset=grpo"], 2, ["algorithm.preset = 'grpo'", "'cispo'"]),
        (["algorithm.correction=tis", "--dry-run"], 2, ["algorithm.correction = 'tis'", "count twice", "'proximal'"]),
        (["schedule.placement=remote"], 2, ["schedule.placement = 'remote'", "not built yet", "'time_sliced'"]),
        (["generate.top_p=0.9"], 2, ["generate.top_p = 0.9", "full sampling distribution", "remove it"]),
        (
            ["generate.max_new_tokens=256", "generate.max_model_len=256"],
            2,
            ["generate.max_new_tokens = 256", "generate.max_model_len = 256", "lower it"],
        ),
        (["steps=3"], 2, ["steps=3", "is no override", "section.key=value"]),
        (["model.path=no/such/folder"], 3, ["model.path = 'no/such/folder'", "config.json", "smollm2-135m-instruct"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_key_is_refused_with_path_value_limit_and_remedy(
    overrides: list[str], code: int, parts: list[str]
) -> None:
    assert_refused(launch("--config", "configs/quickstart.toml", *overrides), code, *parts)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("tasks.0.params.family=chain_sums", ["tasks.0.params.family = 'chain_sums'", "did you mean chain_sum"]),
        ("tasks.0.params.min_term=3", ["tasks.0.params.min_term = 3", "no such key", "did you mean min_terms"]),
        ("tasks.0.params.score=exakt", ["tasks.0.params.score = 'exakt'", "is no scorer", "did you mean exact?"]),
    ],
)
def test_a_wrong_task_is_refused_before_anything_heavy_starts(override: str, parts: list[str]) -> None:
    assert_refused(launch("--config", "configs/quickstart.toml", override), 2, *parts)


def test_a_broken_line_of_a_task_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "2 + 3?"}], "answer": "5"}\n{"messages": []}\n')
    done = launch("--config", "configs/smoke.toml", f"tasks.0.params.path={file}")
    assert_refused(done, 2, f"{file}:2", "the last message is not the user's")


def test_a_missing_task_file_is_named() -> None:
    done = launch("--config", "configs/smoke.toml", "tasks.0.params.path=no/such.jsonl")
    assert_refused(done, 3, "tasks.0.params.path = 'no/such.jsonl'", "no such file")


@pytest.mark.parametrize(
    ("content", "parts"),
    [(None, ["cannot be read", "No such file"]), ("[run]\nsteps =\n", ["is not TOML", "line 2"])],
)
def test_a_config_file_that_cannot_be_read_is_named(tmp_path: Path, content: str | None, parts: list[str]) -> None:
    file = tmp_path / "mine.toml"
    if content is not None:
        file.write_text(content)
    assert_refused(launch("--config", str(file)), 2, f"--config = '{file}'", *parts)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--preview", "0"], ["--preview = 0", "is below 1"]),
        (["--role", "rollout", "--join", "tcp://127.0.0.1:5555"], ["--role = 'rollout'", "not built yet"]),
    ],
    ids=["preview", "role"],
)
def test_a_wrong_argument_is_refused(arguments: list[str], parts: list[str]) -> None:
    assert_refused(launch("--config", "configs/smoke.toml", *arguments), 2, *parts)


def test_several_hosts_are_refused() -> None:
    done = launch("--config", "configs/smoke.toml", environment={"WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"})
    assert_refused(done, 2, "--nnodes = 2", "not built yet")


def test_more_trainer_ranks_than_torchrun_started_are_refused() -> None:
    done = launch("--config", "configs/smoke.toml", "train.ranks=3", environment={"WORLD_SIZE": "2"})
    assert_refused(done, 2, "train.ranks = 3", "torchrun started 2", "--nproc-per-node 3")


def test_offload_without_a_gpu_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    """Only torch knows, so this one waits for it."""
    command = [sys.executable, "launch.py", "--config", "configs/smoke.toml", "train.offload=all"]
    done = subprocess.run(
        [*command, f"run.dir={tmp_path}"], cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert_refused(done, 2, "train.offload = 'all'", "has no GPU", "remove it")
    assert not list(tmp_path.iterdir())


def test_ranks_above_0_leave_the_word_to_rank_0() -> None:
    done = launch("--config", "configs/smoke.toml", "--dry-run", environment={"WORLD_SIZE": "2", "RANK": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("arguments", [[], ["--config", "configs/smoke.toml", "--dry-runs"], ["--preview", "two"]])
def test_what_is_no_argument_ends_with_the_usage(arguments: list[str]) -> None:
    done = launch(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: launch.py")
    assert "Traceback" not in done.stderr
