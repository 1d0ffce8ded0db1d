"""How far trainer and engine are apart with `model.lm_head_dtype` auto and float32, on the quickstart's model.

Printed: mean |log pi - log mu| and k3 over sampled tokens for both heads, before any update, and the ratio of the k3s.

Run: python -m profiling.bench.head_dtype
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from engine import clock, environment
from engine.config import Config, load


async def measure(generator: Any, config: Config, folder: Path) -> float:
    """k3 of ROLLOUTS sampled completions."""
    from engine.train.pack import Judged, Packing, pack
    from engine.train.trainer import TorchTrainer
    from engine.types import Rollout
    from profiling.bench.setup import ROLLOUTS, request

    await generator.open()
    requests = [request(number) for number in range(ROLLOUTS)]
    segments = await generator.wave(requests)
    await generator.close()
    rollouts = [
        Rollout(
            token_ids=np.concatenate([asked.token_ids, made.token_ids]),
            trainable=np.arange(len(asked.token_ids) + len(made.token_ids)) >= len(asked.token_ids),
            logprobs=np.concatenate([np.zeros(len(asked.token_ids), np.float32), made.logprobs]),
            version_spans=(), stop_reason="stop", env="", lease_id="", index_in_group=0, seed=0,
        )
        for asked, made in zip(requests, segments, strict=True)
    ]  # fmt: skip
    packing = Packing(estimator="centered", aggregation="token_mean", micro_batch_tokens=1 << 14, max_new_tokens=1,
                      temperature=1.0)
    (micro_batch,) = pack([Judged(rollout, 1.0, 1.0) for rollout in rollouts], packing, version=0).micro_batches[0]
    own = TorchTrainer(config, folder).logprobs(micro_batch, 1.0)
    log_ratio = (own - micro_batch.logprobs)[micro_batch.trainable].astype(np.float64)
    k3 = float((np.expm1(log_ratio) - log_ratio).mean())
    print(f"lm_head_dtype {config.model.lm_head_dtype}: {len(log_ratio)} tokens, "
          f"mean |log ratio| {np.abs(log_ratio).mean():.4f}, k3 {k3:.5f}", flush=True)
    return k3


def main() -> None:
    environment.prepare()
    from engine.host import build_generator
    from engine.observe.terminal import SilentTerminal
    from engine.train.model import materialise
    from profiling.bench.setup import CONFIG

    found: dict[str, float] = {}
    for dtype in ("auto", "float32"):
        config = load(CONFIG, [f"model.lm_head_dtype={dtype}"])
        folder = materialise(config.model.path)
        with tempfile.TemporaryDirectory() as work:
            generator = build_generator(config, folder, Path(work), SilentTerminal())
            found[dtype] = clock.run(measure(generator, config, folder))
    print(f"k3 with a float32 head / without {found['float32'] / found['auto']:.2f}")


if __name__ == "__main__":
    main()
