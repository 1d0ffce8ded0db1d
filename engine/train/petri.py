"""The petri dish: a Llama of a million parameters, made in about a minute by supervised steps of the trainer itself, on
which reinforcement learning takes about a minute too.

It is first taught to add, until it is right more often than not, and then unsettled: a few steps on mostly wrong
answers spread its samples over many. Like a real model it then knows more than its samples show, and has more to learn.
"""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerFast

from engine.config import Config
from engine.errors import TrainingError
from engine.train.model import byte_tokenizer, random_llama
from engine.train.pack import Packing, supervised_batch
from engine.train.trainer import TorchTrainer
from engine.types import Batch, Rollout

LEARNED, RIGHT = 0.6, 0.25
"""How often a sampled answer is right, once taught and once unsettled."""

_SEED, _LARGEST, _WRONG = 7, 40, 0.8
_BATCH, _CHECKED, _CHECK_EVERY, _MOST_STEPS = 256, 512, 10, 1000
_PACKING = Packing(estimator="leave_one_out", aggregation="token_mean", micro_batch_tokens=1 << 14, max_new_tokens=6,
                   temperature=1.0)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """petri.json beside the weights: how they came about, and their SHA-256. `right` is exact: see `_right`."""

    taught_steps: int
    unsettling_steps: int
    right: float
    sha256: str


def build_petri(folder: Path) -> None:
    """Train from scratch on sums of numbers up to 40.

    Raises:
        TrainingError: the model has not learned within several times the usual number of steps.
    """
    tokenizer = byte_tokenizer()
    random_llama(
        tokenizer, _SEED, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=True,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    trainer = TorchTrainer(_config(), folder)
    draws = random.Random(_SEED)
    checked = supervised_batch([_sum(tokenizer, draws, wrong=0.0) for _ in range(_CHECKED)], _PACKING)

    def train(steps: int, *, wrong: float) -> float:
        for _ in range(steps):
            trainer.step(supervised_batch([_sum(tokenizer, draws, wrong=wrong) for _ in range(_BATCH)], _PACKING))
        return _right(trainer, checked)

    taught = unsettling = 0
    right = 0.0
    while right < LEARNED:
        if taught >= _MOST_STEPS:
            raise TrainingError(f"the petri model had not learned to add after {taught} steps")
        right = train(_CHECK_EVERY, wrong=0.0)
        taught += _CHECK_EVERY
        print(f"  .. making the petri model: {right:.2f} right after {taught} steps, until {LEARNED}", file=sys.stderr,
              flush=True)
    while right > RIGHT:
        if unsettling >= _MOST_STEPS:
            raise TrainingError(f"the petri model was not unsettled by {unsettling} steps")
        right = train(1, wrong=_WRONG)
        unsettling += 1
    trainer.model.save_pretrained(folder)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    record = Record(taught_steps=taught, unsettling_steps=unsettling, right=right, sha256=digest)
    (folder / "petri.json").write_bytes(msgspec.json.encode(record))


def _config() -> Config:
    return msgspec.convert(
        {
            "run": {"steps": _MOST_STEPS},
            "model": {"path": "petri", "dtype": "float32"},
            "tasks": [{"env": "chats"}],
            "algorithm": {"preset": "ce"},
            "train": {"lr": 2e-3, "warmup_steps": 50, "dtype": "float32"},
            "generate": {"max_model_len": 64},
        },
        Config,
    )


def _sum(tokenizer: PreTrainedTokenizerFast, draws: random.Random, *, wrong: float) -> Rollout:
    """A question of `engine.tasks.sums` and its answer, or with probability `wrong` any other."""
    left, right = draws.randint(0, _LARGEST), draws.randint(0, _LARGEST)
    answer = draws.randint(0, 2 * _LARGEST) if draws.random() < wrong else left + right
    chat = [{"role": "user", "content": f"{left}+{right}="}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    asked = tokenizer.encode(str(prompt), add_special_tokens=False)
    said = [*tokenizer.encode(str(answer), add_special_tokens=False), tokenizer.eos_token_id]
    total = len(asked) + len(said)
    return Rollout(
        token_ids=np.asarray([*asked, *said], np.int32),
        trainable=np.arange(total) >= len(asked),
        logprobs=np.zeros(total, np.float32),
        version_spans=(),
        stop_reason="stop",
        env="sums",
        lease_id="",
        index_in_group=0,
        seed=0,
    )


def _right(trainer: TorchTrainer, checked: Batch) -> float:
    """The probability that a sampled answer is the right one, exactly: the mean over sums of its tokens' product."""
    micro_batch = checked.micro_batches[0][0]
    sums = np.add.reduceat(trainer.logprobs(micro_batch, 1.0).astype(np.float64), micro_batch.cu_seqlens[:-1])
    return float(np.exp(sums).mean())
