"""The tiny model's tokenizer, end tokens, and how `model.path` becomes a folder."""

from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.errors import MissingError
from engine.train import model
from engine.train.attention import PACKED_ATTENTION
from engine.train.model import build_tiny, end_token_ids, load_model, materialise

pytestmark = pytest.mark.usefixtures("one_cpu")


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_folder)


def assert_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())  # one token a byte
    assert all(0 <= token < 256 for token in ids)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    "text",
    ["", "2 + 3?", "  two  spaces , then . ", "\r\n\t", "\x00", "\x00a\x1b[31m\x7f", "😀 👩\u200d👩\u200d👧",
     "e\u0301 é ﬁ", "שלום", "don't  I'm", "\ufeff\u2028\U0010ffff"],
    ids=ascii,
)  # fmt: skip
def test_any_text_comes_back(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert_round_trip(tokenizer, text)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=80, deadline=None)
def test_any_drawn_text_comes_back(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert_round_trip(tokenizer, text)


def test_one_turn_of_chat(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
    shown = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert shown == "<|system|>Be brief.<|end|><|user|>2 + 3?<|end|><|assistant|>"
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    end, system, user, assistant = (tokenizer.convert_tokens_to_ids(token) for token in special)
    first, second = tokenizer.encode("Be brief."), tokenizer.encode("2 + 3?")
    assert ids == [system, *first, end, user, *second, end, assistant]


def test_end_tokens_are_the_tokenizers_and_the_configs(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    end = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|end|>")
    assert end_token_ids(folder) == (end,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8], "top_k": 20}))
    assert end_token_ids(folder) == (end,)
    config = json.loads((folder / "config.json").read_text())
    for configured, expected in ([9, end], (9, end)), (9, (9, end)), (None, (end,)):
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": configured}))
        assert end_token_ids(folder) == expected


def test_a_loaded_model_trains_in_the_asked_dtype_with_packed_attention(tiny_folder: Path) -> None:
    loaded = load_model(tiny_folder, torch.float32, torch.device("cpu"))
    assert loaded.training
    assert loaded.config._attn_implementation == PACKED_ATTENTION
    assert {(parameter.dtype, parameter.requires_grad) for parameter in loaded.parameters()} == {(torch.float32, True)}


def test_the_tiny_model_is_the_same_every_time(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        build_tiny(tmp_path / name, seed=seed)
    first, again, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "again", "other"))
    assert first == again != other
    assert torch.equal(state, torch.random.get_rng_state())


def test_an_alias_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = materialise("tiny-random")
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert materialise("tiny-random") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert end_token_ids(folder) == (256,)
    assert [path.name for path in (tmp_path / "farfield").iterdir()] == [folder.name]


def test_builders_at_once_do_not_clash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four start before any has ended; one wins, all get its folder, whole."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    together = threading.Barrier(4)

    def build(folder: Path) -> None:
        together.wait(10)
        (folder / "first").write_text("1")
        time.sleep(0.01)
        (folder / "second").write_text("2")

    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: model._cached("model", build), range(4)))
    assert len(set(folders)) == 1
    assert {path.name for path in folders[0].iterdir()} == {"first", "second"}
    assert [path.name for path in (tmp_path / "farfield").iterdir()] == [folders[0].name]


@pytest.mark.parametrize("error", [OSError("disk full"), MissingError("no package", remedy="install it")], ids=repr)
def test_a_builder_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def build(folder: Path) -> None:
        (folder / "half").write_text("1")
        raise error

    with pytest.raises(type(error)) as raised:
        model._cached("model", build)
    assert raised.value is error
    assert list((tmp_path / "farfield").iterdir()) == []


@pytest.mark.parametrize("hub_id", ["no-such-org/no-such-model", "no-such-org/-model", "no-such-org/model..x"])
def test_a_hub_id_that_cannot_be_had_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_id: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # HF_HUB_OFFLINE=1, read at import
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    begun_s = time.monotonic()
    with pytest.raises(MissingError, match=f"model.path = '{hub_id}'.*\n.*HF_HUB_OFFLINE=1"):
        materialise(hub_id)
    assert time.monotonic() - begun_s < 4


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert materialise(str(tmp_path)) == tmp_path
    assert materialise("~/model") == tmp_path / "model"
