"""One vLLM engine per model for the whole session: starting one takes tens of seconds."""

from __future__ import annotations

import asyncio
import gc
import json
import warnings
from collections.abc import Collection, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from engine.config import Config, GenerateSection, ModelSection, RunSection, TaskSection, TrainSection
from engine.environment import engine_environment


class Engine:
    """A running tiny model in float32 and the loop it lives on; `processes` are those that vLLM started. If `endless`,
    no token ends a request: each makes as many as it may."""

    def __init__(
        self, folder: Path, work: Path, *, worker_extension: str = "", cores: Collection[int] = (),
        endless: bool = False,
    ) -> None:
        from engine.train.model import end_token_ids

        self.folder = folder
        self.config = Config(
            run=RunSection(steps=100),
            model=ModelSection(path=str(folder), dtype="float32"),
            tasks=(TaskSection(env="reasoning_gym", name="chain_sum"),),
            generate=GenerateSection(max_model_len=2048, max_new_tokens=1024, max_in_flight=64, kv_cache_gib=0.25),
            train=TrainSection(lr=1e-2, dtype="float32"),
        )
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._runner.__enter__()
        log_file = work / "engine.log"
        before = set(psutil.Process().children(recursive=True))
        with engine_environment(log_file, cores=cores):
            from engine.generate.vllm import VllmGenerator

            self.generator = VllmGenerator(
                folder, self.config.generate, dtype="float32", seed=0,
                end_token_ids=() if endless else end_token_ids(folder),
                log_file=log_file, worker_extension=worker_extension,
            )
        self.processes = set(psutil.Process().children(recursive=True)) - before
        self.run(self.generator.open())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    def close(self) -> None:
        """The last test of the session may be any: what vLLM leaves unclosed is not its fault."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.run(self.generator.close())
            self._runner.__exit__(None, None, None)
            del self.generator
            gc.collect()


def _engine(tmp_path_factory: pytest.TempPathFactory, *, tied: bool) -> Iterator[Engine]:
    from engine.train.model import build_tiny

    work = tmp_path_factory.mktemp("engine")
    folder = work / "model"
    folder.mkdir()
    build_tiny(folder, tied=tied)
    # What a model's author recommends must not shape our sampling.
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 3, "temperature": 0.1}))
    engine = Engine(folder, work)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    yield from _engine(tmp_path_factory, tied=True)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    yield from _engine(tmp_path_factory, tied=False)
