"""Which folder a run gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hand_made import config

from engine.errors import ConfigError
from engine.observe.folder import create_run_folder


def named(parent: Path) -> Path:
    return create_run_folder(config(run={"dir": str(parent), "name": "mine"}), "smoke")


def test_a_start_that_failed_does_not_keep_its_name(tmp_path: Path) -> None:
    folder = named(tmp_path)
    (folder / "engine.log").write_text("no such model")
    (folder / "metrics.jsonl").touch()
    assert named(tmp_path) == folder


def test_a_run_that_has_made_a_step_does(tmp_path: Path) -> None:
    (named(tmp_path) / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="holds something already"):
        named(tmp_path)


def test_a_folder_that_is_no_runs_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="holds something already"):
        named(tmp_path)


def test_without_a_name_every_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    settings = config(run={"dir": str(tmp_path)})
    assert len({create_run_folder(settings, "smoke") for _ in range(3)}) == 3
