"""Packed attention against plain eager attention, one sequence at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine.train.attention import pack_layout
from engine.train.model import load_model

pytestmark = pytest.mark.usefixtures("one_cpu")

Hidden = Callable[[list[list[int]]], list[torch.Tensor]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in which 4 query heads share 2 key-value heads, and attention is far from even."""
    config = LlamaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.15, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def packed(folder: Path) -> Hidden:
    """Hidden states [T, D] of each sequence, from one packed forward."""
    model = load_model(folder, torch.float32, torch.device("cpu"))

    def hidden(sequences: list[list[int]]) -> list[torch.Tensor]:
        lengths = [len(sequence) for sequence in sequences]
        index, shape = pack_layout(torch.tensor([0, *itertools.accumulate(lengths)]))
        with torch.no_grad():
            output = model.base_model(
                input_ids=torch.tensor([list(itertools.chain(*sequences))]),
                position_ids=torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0),
                use_cache=False,
                pack_index=index,
                pack_shape=shape,
            )
        return list(output.last_hidden_state[0].split(lengths))

    return hidden


def sequences(*lengths: int, seed: int = 0) -> list[list[int]]:
    draws = np.random.default_rng(seed)
    return [draws.integers(0, 99, length).tolist() for length in lengths]


@pytest.mark.parametrize("lengths", [(1, 7, 1, 30, 3), (1,), (12,), (5, 5, 5), (1, 1, 1)], ids=str)
def test_packed_is_sequence_by_sequence(folder: Path, packed: Hidden, lengths: tuple[int, ...]) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    given = sequences(*lengths)
    for sequence, hidden in zip(given, packed(given), strict=True):
        with torch.no_grad():
            expected = plain.base_model(input_ids=torch.tensor([sequence])).last_hidden_state[0]
        assert (hidden - expected).abs().max() < 1e-5


def test_a_neighbours_tokens_change_nothing(packed: Hidden) -> None:
    left, middle, right = sequences(6, 9, 4)
    other_left, other_right = sequences(6, 4, seed=1)
    before = packed([left, middle, right])
    after = packed([other_left, middle, other_right])
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0], after[0])
    assert not torch.equal(before[2], after[2])


def test_a_later_token_changes_nothing_and_an_earlier_one_does(packed: Hidden) -> None:
    first, second = sequences(5, 8)
    before = packed([first, second])[1]
    later = packed([first, [*second[:6], (second[6] + 1) % 99, second[7]]])[1]
    earlier = packed([first, [(second[0] + 1) % 99, *second[1:]]])[1]
    assert torch.equal(before[:6], later[:6])
    assert (before[7] - later[7]).abs().max() > 1e-2
    assert (before[7] - earlier[7]).abs().max() > 1e-2


def test_layout_by_hand() -> None:
    """Lengths 1, 3 and 2 in a block of three rows of 3."""
    index, shape = pack_layout(torch.tensor([0, 1, 4, 6]))
    assert index.tolist() == [0, 3, 4, 5, 6, 7]
    assert shape == (3, 3)
