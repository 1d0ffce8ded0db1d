"""Lock files: pins and nothing else, in step with pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(hardware: str) -> dict[str, str]:
    lines = (ROOT / f"requirements/{hardware}.lock").read_text().splitlines()
    found = [re.fullmatch(r"([a-z0-9-]+)==([\w.+!]+)", line) for line in lines]
    assert all(found), "a lock file holds name==version lines only: no addresses, folders or hashes"
    return {pin[1]: pin[2] for pin in found if pin}


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_a_lock_satisfies_the_project(hardware: str) -> None:
    locked = pins(hardware)
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *extras[hardware], *extras["dev"]]:
        requirement = Requirement(text)
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), f"{text}, locked at {version}: run make lock"


def test_each_lock_has_its_own_torch() -> None:
    assert pins("cpu")["torch"] == f"{pins('gpu')['torch']}+cpu"
    assert not pins("cpu").keys() & {"torchvision", "torchaudio", "torchcodec"}


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_nothing_that_is_locked_is_compiled_when_installed(hardware: str) -> None:
    assert not pins(hardware).keys() & {"pycosat", "llama-cpp-python"}
