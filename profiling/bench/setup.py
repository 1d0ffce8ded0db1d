"""What the benches share: an engine, a trainer, and a batch of the quickstart's shape."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine import clock
from engine.config import Config, load
from engine.environment import engine_environment
from engine.types import Batch, MicroBatch, SegmentRequest

if TYPE_CHECKING:
    from engine.generate.vllm import VllmGenerator

CONFIG = Path("configs/quickstart.toml")
PROMPT_TOKENS, NEW_TOKENS, ROLLOUTS = 32, 24, 64


def start_engine(config: Config, folder: Path, log_file: Path, worker_extension: str = "") -> VllmGenerator:
    """The quickstart's engine, with an extension of its worker if a bench needs to look inside."""
    with engine_environment(log_file):
        from engine.generate.vllm import VllmGenerator
        from engine.train.model import end_token_ids

        return VllmGenerator(
            folder, config.generate, dtype=config.engine_dtype, seed=0, end_token_ids=end_token_ids(folder),
            log_file=log_file, worker_extension=worker_extension,
        )


def on_engine(measure: Callable[[Any, Config, Path], Coroutine[Any, Any, None]], extension: str = "") -> None:
    """Run a bench's `measure` with the quickstart's engine, configuration and model folder."""
    from engine.train.model import materialise

    config = quickstart()
    folder = materialise(config.model.path)
    with tempfile.TemporaryDirectory() as work:
        clock.run(measure(start_engine(config, folder, Path(work) / "engine.log", extension), config, folder))


def quickstart() -> Config:
    """The shipped configuration."""
    return load(CONFIG)


def batch(vocabulary: int = 40_000) -> Batch:
    """One step of random tokens."""
    random = np.random.default_rng(0)
    length = PROMPT_TOKENS + NEW_TOKENS
    total = ROLLOUTS * length
    micro_batch = MicroBatch(
        token_ids=random.integers(5, vocabulary, total).astype(np.int32),
        position_ids=np.tile(np.arange(length, dtype=np.int32), ROLLOUTS),
        cu_seqlens=np.arange(0, total + 1, length, dtype=np.int32),
        trainable=np.tile(np.arange(length) >= PROMPT_TOKENS, ROLLOUTS),
        logprobs=np.full(total, -9.0, np.float32),
        advantages=np.repeat(random.normal(size=ROLLOUTS), length).astype(np.float32),
        weights=np.full(total, 1 / (ROLLOUTS * NEW_TOKENS), np.float32),
        staleness=np.zeros(total, np.int32),
    )
    return Batch(micro_batches=((micro_batch,),), num_tokens=ROLLOUTS * NEW_TOKENS, temperature=1.0)


def request(number: int) -> SegmentRequest:
    """One random prompt."""
    prompt = np.random.default_rng(number).integers(5, 40_000, PROMPT_TOKENS).astype(np.int32)
    return SegmentRequest(
        request_id=f"bench-{number}", token_ids=prompt, max_new_tokens=NEW_TOKENS, temperature=1.0, seed=number
    )
