"""Several ranks, as torchrun starts them, on recorded rollouts: the same losses and weights as one; and what happens
when a rank fails."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from engine.clock import run, within
from engine.errors import TrainingError
from engine.train.model import materialise

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
STEPS = 5
# Adam's first updates are near the learning rate whatever the gradient is: far above what the ranks may differ by.
LEARNING_RATE, TOLERANCE = 3e-4, 1e-5
# Two micro-batches a rank at the least, so that gradients gather over several.
OVERRIDES = ("evals.every=0", "observe.tensorboard=false", "observe.terminal=off", f"run.steps={STEPS}",
             f"train.lr={LEARNING_RATE}", "train.dtype=float32", "model.dtype=float32",
             "train.micro_batch_tokens=160", "generate.max_model_len=160")


def launch(folder: Path, *overrides: str, ranks: int = 1) -> Path:
    """A whole run of the smoke configuration's tasks in `folder`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "launch.py", "--config",
               "configs/smoke.toml", f"run.dir={folder.parent}", f"run.name={folder.name}", *OVERRIDES, *overrides]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=280)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints/latest/model.safetensors")


def assert_same_training(one: Path, several: Path) -> None:
    for left, right in zip(rows(one), rows(several), strict=True):
        for key in ("loss", "grad_norm", "entropy", "mismatch/k1", "mismatch/k3", "mismatch/ess", "rule/fraction"):
            assert right[key] == pytest.approx(left[key], rel=TOLERANCE, abs=TOLERANCE), key
    mine, theirs = weights(one), weights(several)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the fake generator, whose log-probs are its own: ratios are far from 1."""
    return launch(tmp_path_factory.mktemp("recorded") / "run", "generate.backend=fake")


@pytest.fixture(scope="module")
def alone(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(tmp_path_factory.mktemp("alone") / "run", *replay(recorded))


def replay(recorded: Path) -> tuple[str, str]:
    return "generate.backend=replay", f"generate.replay_from={recorded}"


def test_the_steps_move_the_weights(alone: Path) -> None:
    before = load_file(materialise("tiny-random") / "model.safetensors")
    moved = max(float((before[name] - tensor).abs().max()) for name, tensor in weights(alone).items())
    assert moved > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, ["train.fsdp=false"]),
        (2, ["train.fsdp=true"]),
        (2, ["train.fsdp=true", "train.activation_checkpointing=true"]),
        (3, ["train.fsdp=true", "train.ranks=2"]),
    ],
    ids=["copies", "shards", "checkpointing", "one-rank-does-not-train"],
)
def test_ranks_change_nothing(
    recorded: Path, alone: Path, tmp_path: Path, ranks: int, overrides: list[str]
) -> None:
    assert_same_training(alone, launch(tmp_path / "several", *replay(recorded), *overrides, ranks=ranks))


def test_a_rank_with_nothing_left_takes_part(recorded: Path, untied_folder: Path, tmp_path: Path) -> None:
    """Four rollouts of more than half a micro-batch each: two ranks have an empty round, in which their head, untied,
    gets no gradient."""
    chosen = (*replay(recorded), f"model.path={untied_folder}", "schedule.groups_per_step=1",
              "train.micro_batch_tokens=64", "generate.max_model_len=64")
    one = launch(tmp_path / "one", *chosen)
    assert_same_training(one, launch(tmp_path / "three", *chosen, "train.fsdp=true", ranks=3))


@pytest.mark.parametrize("preset", ["m2po", "decoupled_ppo"])
def test_what_a_loss_asks_of_the_whole_batch_comes_from_all_ranks(recorded: Path, tmp_path: Path, preset: str) -> None:
    chosen = (*replay(recorded), f"algorithm.preset={preset}", "algorithm.aggregation=prompt_mean")
    one = launch(tmp_path / "one", *chosen)
    assert_same_training(one, launch(tmp_path / "two", *chosen, "train.fsdp=true", ranks=2))


def test_ranks_change_nothing_on_the_real_model(recorded: Path, tmp_path: Path) -> None:
    real = ("generate.backend=fake", "model.path=smollm2-135m-instruct", "train.lr=2e-5", "run.steps=5")
    one = launch(tmp_path / "one", *real)
    again = (*replay(one), *real[1:])
    assert_same_training(one, launch(tmp_path / "two", *again, "train.fsdp=true", ranks=2))


def rank_1(port: int) -> None:
    from engine.train.rank import World, serve_rank

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.exit(serve_rank(World(1, 2, 1)))


def test_a_rank_that_fails_ends_the_run_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    from engine.train.rank import Gather, Learner, World

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    other = multiprocessing.get_context("spawn").Process(target=rank_1, args=(free_port,))
    other.start()
    learner = Learner(World(0, 2, 0), 2, 60.0)
    try:
        learner._await_hellos()
        learner._tell([b"1"], Gather())  # before there is a trainer
        with pytest.raises(TrainingError, match=r"(?s)trainer rank 1 failed.*assert trainer is not None"):
            run(within(60, "the rank's report", learner.watch()))
    finally:
        learner.close()
    other.join(30)
    assert other.exitcode == 1


def rank_0(port: int, folder: Path, reference: Path, fsdp: bool, other: int) -> None:
    """Steps with everything off the device in between, against one rank that keeps it. At the end a step without
    `onload`, at which rank 1, the process `other`, fails: its tensors were away too."""
    from hand_made import config, group, packing, rollout

    from engine.train.pack import build_batch
    from engine.train.rank import Learner, World
    from engine.train.trainer import TorchTrainer

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    settings = config(train={"fsdp": fsdp, "lr": LEARNING_RATE}, model={"path": "tiny", "reference": "other"},
                      algorithm={"kl": {"to": "reference", "kind": "k2", "coef": 0.1}},
                      schedule={"placement": "split"})
    groups = [group(rollout(1.0, sampled=[3, 4, 5]), rollout(0.0, sampled=[6, 7], index=1))]
    one, two = (build_batch(groups, packing(ranks=ranks), version=0)[0] for ranks in (1, 2))
    alone = TorchTrainer(settings, folder, reference_folder=reference)
    learner = Learner(World(0, 2, 0), 2, 60.0)
    trainer = learner.trainer(settings, folder, reference)
    for _ in range(3):
        trainer.offload("all")
        trainer.onload()
        assert trainer.step(two).metrics["loss"] == pytest.approx(alone.step(one).metrics["loss"], abs=TOLERANCE)
    cores = sorted(os.sched_getaffinity(0))
    half = cores[len(cores) // 2 :]
    assert psutil.Process(other).cpu_affinity() == half[len(half) // 2 :]  # the second rank's half of the trainer's
    theirs = dict(alone.full_parameters())
    for name, tensor in trainer.full_parameters():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=TOLERANCE)
    trainer.offload("all")
    learner.step(two)
    with pytest.raises(TrainingError, match=r"(?s)trainer rank 1 failed.*assert not self._offload.away"):
        run(within(60, "the rank's report", learner.watch()))
    learner.close()


@pytest.mark.parametrize("fsdp", [False, True], ids=["copies", "shards"])
def test_every_rank_leaves_its_device_and_comes_back(
    tiny_folder: Path, untied_folder: Path, free_port: int, fsdp: bool
) -> None:
    spawn = multiprocessing.get_context("spawn")
    other = spawn.Process(target=rank_1, args=(free_port,))
    other.start()
    learner = spawn.Process(target=rank_0, args=(free_port, tiny_folder, untied_folder, fsdp, other.pid))
    learner.start()
    for process in (learner, other):
        process.join(120)
    assert (learner.exitcode, other.exitcode) == (0, 1)


def test_a_signal_ends_the_step_and_saves_with_every_rank(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start_endless(tmp_path)
    try:
        children = until_rows(folder, 3, process)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    steps = len(rows(folder))
    assert f"stopped after {steps} steps" in output
    assert (folder / "checkpoints/latest").resolve().name == f"step-{steps:06d}"
    assert not psutil.wait_procs(children, timeout=10)[1]


def start_endless(parent: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "launch.py", "--config",
               "configs/smoke.toml", f"run.dir={parent}", "run.name=run", *OVERRIDES, "observe.terminal=plain",
               "generate.backend=fake", "run.steps=100000"]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def until_rows(folder: Path, count: int, process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Wait until the run has made `count` steps; returns its processes."""
    while not (folder / "metrics.jsonl").exists() or len(rows(folder)) < count:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("number", ["0", "1"], ids=["learner", "other"])
def test_a_killed_rank_ends_the_run_and_leaves_nothing(tmp_path: Path, number: str) -> None:
    folder = tmp_path / "run"
    process = start_endless(tmp_path)
    try:
        children = until_rows(folder, 3, process)
        rank = next(child for child in children if child.environ().get("RANK") == number)
        rank.send_signal(signal.SIGKILL)
        output = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == 1, output
    assert not psutil.wait_procs(children, timeout=10)[1]
