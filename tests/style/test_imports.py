"""Imports point one way: foundations see no stage, stages see no other stage, only the top files see everything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FOUNDATIONS = {
    "types", "protocols", "config", "errors", "clock", "channel", "transport", "observe", "environment", "vllm_plugin",
    "seeds", "gym",
}  # fmt: skip
STAGES = {"tasks", "generate", "reward", "rollout", "algorithms", "train", "weights", "trust"}
TOP = {"loop", "host", "timeslice", "preview", "supervised", "doctor"}
BESIDE_ITSELF = {
    **dict.fromkeys(FOUNDATIONS | STAGES | {"admission"}, FOUNDATIONS),
    "train": FOUNDATIONS | {"algorithms"},
    # engine/reward/answer.py, pure functions: gold answers are found as the completions' are.
    "tasks": FOUNDATIONS | {"reward"},
    **dict.fromkeys(TOP, FOUNDATIONS | STAGES | TOP | {"admission"}),
}
OUTSIDE = {"evals", "profiling", "launch", "tests"}


def imported_names(source: str, file: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything that `file`, a path below the root, imports at any depth."""
    package = file.parent.parts
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            base = (*start, node.module) if node.module else start
            yield from ((node.lineno, ".".join((*base, alias.name))) for alias in node.names)


def violations(source: str, file: Path) -> list[str]:
    """Imports of `file` that its part of the engine may not have."""
    part = file.parts[1].removesuffix(".py")
    allowed = {part} | BESIDE_ITSELF.get(part, set())
    wrong: list[str] = []
    for line, name in imported_names(source, file):
        top, _, rest = name.partition(".")
        if top in OUTSIDE or (top == "engine" and rest.partition(".")[0] not in allowed):
            wrong.append(f"{file}:{line} imports {name}")
    return wrong


def engine_files() -> list[Path]:
    return [path.relative_to(ROOT) for path in sorted((ROOT / "engine").rglob("*.py"))]


def test_every_part_of_the_engine_has_its_place() -> None:
    parts = {file.parts[1].removesuffix(".py") for file in engine_files()} - {"__init__"}
    assert parts <= BESIDE_ITSELF.keys(), "say in this file what the new part may import"


@pytest.mark.parametrize("file", engine_files(), ids=str)
def test_imports_point_one_way(file: Path) -> None:
    assert violations((ROOT / file).read_text(), file) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("engine/types.py", "import engine.rollout.drive"),
        ("engine/types.py", "from engine import rollout"),
        ("engine/types.py", "from .rollout import drive"),
        ("engine/observe/metrics.py", "from ..loop import main"),
        ("engine/rollout/drive.py", "from .. import generate"),
        ("engine/rollout/drive.py", "from ..generate.fake import FakeGenerator"),
        ("engine/rollout/drive.py", "def later():\n    from engine.loop import main"),
        ("engine/rollout/__init__.py", "from ..reward import pool"),
        ("engine/algorithms/loss.py", "from engine.train import model"),
        ("engine/admission.py", "from engine.rollout.drive import drive"),
        ("engine/tasks/source.py", "from engine import *"),
        ("engine/tasks/source.py", "import engine"),
        ("engine/__init__.py", "from engine.types import Task"),
        ("engine/loop.py", "import evals.run"),
        ("engine/host.py", "from profiling import nvml"),
    ],
)
def test_the_check_sees_every_way_to_import(file: str, source: str) -> None:
    assert len(violations(source, Path(file))) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("engine/rollout/drive.py", "from engine.types import Task\nfrom .segments import run"),
        ("engine/rollout/drive.py", "from ..clock import now"),
        ("engine/rollout/drive.py", "import numpy\nfrom vllm.engine import arg_utils"),
        ("engine/rollout/drive.py", "from engine import errors, types"),
        ("engine/generate/replay.py", "from engine.observe.metrics import read_groups"),
        ("engine/train/trainer.py", "from engine.algorithms.loss import policy_loss"),
        ("engine/loop.py", "from engine import admission, rollout\nfrom .train import trainer"),
    ],
)
def test_the_check_lets_the_rest_pass(file: str, source: str) -> None:
    assert violations(source, Path(file)) == []
