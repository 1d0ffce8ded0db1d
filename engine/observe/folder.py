"""The folder of a run: every file that it leaves is in it."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from engine.config import Config
from engine.errors import ConfigError


def create_run_folder(config: Config, config_name: str) -> Path:
    """A new folder runs/NAME with the resolved configuration.

    Raises:
        ConfigError: a folder of that name holds a run, or something else.
    """
    parent = Path(config.run.dir).expanduser()
    text = msgspec.toml.encode(config)
    name = config.run.name or f"{config_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = [parent / name]
    if not config.run.name:
        candidates += [parent / f"{name}-{count}" for count in range(2, 100)]
    for folder in candidates:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            # One without a step may be another run's that starts in this second: taken only if it was asked for.
            if not config.run.name or not folder.is_dir() or _holds_a_run(folder):
                continue
        except OSError as error:
            raise ConfigError(
                "run.dir", value=config.run.dir, limit=f"cannot be written ({error.strerror})", remedy="name another"
            ) from error
        (folder / "config.toml").write_bytes(text)
        return folder
    raise ConfigError(
        "run.name", value=config.run.name, limit=f"{candidates[0]} holds something already",
        remedy="choose another name, or delete that folder",
    )


def _holds_a_run(folder: Path) -> bool:
    """Whether anything would be lost: a start that failed before the first step leaves nothing worth keeping."""
    rows = folder / "metrics.jsonl"
    known = (folder / "config.toml").is_file() or not any(folder.iterdir())
    return not known or (rows.is_file() and rows.stat().st_size > 0)
