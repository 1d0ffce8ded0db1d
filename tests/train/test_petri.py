"""The petri dish: its questions, its measure, and the whole model (marked: about a minute on two free cores)."""

from __future__ import annotations

import hashlib
import itertools
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hand_made import config, packing, rollout
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config import TaskSection
from engine.rollout.chat import Chat
from engine.tasks.sums import Sums
from engine.train.model import byte_tokenizer
from engine.train.pack import supervised_batch
from engine.train.petri import LEARNED, RIGHT, Record, _right, _sum, build_petri
from engine.train.trainer import TorchTrainer
from engine.types import Message, Task


def as_chat(left: int, right: int, answer: int) -> Task:
    messages = (Message("user", f"{left}+{right}="), Message("assistant", str(answer)))
    return Task(task_id="t", env="sums", index=0, messages=messages, answer={}, seed=0)


def test_it_is_taught_what_a_run_on_sums_will_ask(tiny_folder: Path) -> None:
    """Token by token, prompt and all, with the template that the model is saved with."""
    chat, draws = Chat(tiny_folder, 64), random.Random(7)
    environment = Sums(TaskSection(env="engine.tasks.sums:Sums"))
    asked = {chat.decode_all(chat.encode(as_chat_of(environment, index))) for index in range(20_000)}
    made = [_sum(byte_tokenizer(), draws, wrong=0.0) for _ in range(300)]
    for one in made:
        prompt = chat.decode_all(one.token_ids[~one.trainable])
        assert prompt in asked  # 20,000 draws of 1,681 sums leave one out with a chance of .01
        left, right = map(int, prompt.removeprefix("<|user|>").removesuffix("=<|end|><|assistant|>").split("+"))
        same = chat.conversation(as_chat(left, right, left + right))
        assert (one.token_ids.tolist(), one.trainable.tolist()) == (same.token_ids.tolist(), same.trainable.tolist())


def as_chat_of(environment: Sums, index: int) -> Task:
    return Task(task_id="t", env="sums", index=0, messages=environment.train(index).messages, answer={}, seed=0)


@pytest.mark.parametrize(("wrong", "expected"), [(0.0, 1.0), (0.8, 0.2 + 0.8 / 81), (1.0, 1 / 81)])
def test_how_often_it_is_told_the_truth(wrong: float, expected: float) -> None:
    """A wrong answer is any of 81, by chance the right one too; 2,000 draws have a standard error below .009."""
    tokenizer, draws = byte_tokenizer(), random.Random(5)
    right = 0
    for _ in range(2000):
        question, answer = tokenizer.decode(_sum(tokenizer, draws, wrong=wrong).token_ids).split("=")
        left, other = question.removeprefix("<|user|>").split("+")
        right += answer == f"<|end|><|assistant|>{int(left) + int(other)}<|end|>"
    assert right / 2000 == pytest.approx(expected, abs=0.03 if wrong < 1 else 0.02)


@pytest.mark.usefixtures("one_cpu")
def test_right_is_the_mean_over_sums_of_their_answers_probability(tiny_folder: Path) -> None:
    chats = [rollout(None, prompt=[1, 2, 3], sampled=sampled) for sampled in ([4, 5, 6], [7], [8, 9])]
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64, attn_implementation="eager")
    expected: list[float] = []
    for chat in chats:
        ids = torch.tensor(chat.token_ids.tolist())
        probabilities = plain(input_ids=ids.unsqueeze(0)).logits[0].softmax(-1)
        expected.append(float(np.prod([probabilities[at - 1, ids[at]].item() for at in range(3, len(ids))])))
    trainer = TorchTrainer(config(algorithm={"preset": "ce"}), tiny_folder)
    right = _right(trainer, supervised_batch(chats, packing()))
    assert right == pytest.approx(sum(expected) / 3, rel=1e-4)
    assert min(expected) < max(expected) / 10  # the mean of products is no product of means


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_the_whole_dish(tmp_path: Path) -> None:
    """Over all 1,681 sums, counted by transformers in float64."""
    build_petri(tmp_path)
    record = msgspec.json.decode((tmp_path / "petri.json").read_bytes(), type=Record)
    assert record.sha256 == hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert record.right <= RIGHT < LEARNED
    assert record.taught_steps % 10 == 0
    assert 1 <= record.unsettling_steps < 20 < record.taught_steps < 600

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert 1e6 < model.num_parameters() < 1.1e6
    probability = greedy = 0.0
    sums = list(itertools.product(range(41), repeat=2))
    chats = [
        tokenizer.encode(f"<|user|>{left}+{right}=<|end|><|assistant|>{left + right}<|end|>") for left, right in sums
    ]
    prompts = [ids.index(260) + 1 for ids in chats]
    width = max(map(len, chats))
    padded = torch.tensor([ids + [257] * (width - len(ids)) for ids in chats])
    with torch.no_grad():
        logprobs = model(input_ids=padded).logits.log_softmax(-1)
    for row, (ids, start) in enumerate(zip(chats, prompts, strict=True)):
        told = logprobs[row, start - 1 : len(ids) - 1]
        probability += float(told[range(len(ids) - start), ids[start:]].sum().exp()) / len(sums)
        greedy += (told.argmax(-1).tolist() == ids[start:]) / len(sums)
    assert probability == pytest.approx(record.right, abs=0.05)
    assert greedy > probability + 0.05
