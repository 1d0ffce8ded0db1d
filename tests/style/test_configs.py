"""Every shipped config parses and passes all checks that need no heavy import."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import load

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.toml"))


def test_configs_are_shipped() -> None:
    assert SHIPPED


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_config_is_accepted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    load(path)
