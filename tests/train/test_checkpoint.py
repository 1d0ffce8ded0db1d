"""What is saved is what transformers loads; a folder of the final name is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import PreTrainedModel

from engine.train import checkpoint
from engine.train.checkpoint import save_checkpoint
from engine.train.model import load_model

pytestmark = pytest.mark.usefixtures("one_cpu")

PROMPT = torch.tensor([[5, 6, 7, 250]])


@pytest.fixture(params=["tied", "untied"])
def source(request: pytest.FixtureRequest, tiny_folder: Path, untied_folder: Path) -> Path:
    return tiny_folder if request.param == "tied" else untied_folder


def train_a_little(model: torch.nn.Module) -> None:
    """The same change on every call: what is saved then differs from the source folder in every parameter."""
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.05)


def trained(source: Path) -> PreTrainedModel:
    model = load_model(source, torch.float32, torch.device("cpu"))
    train_a_little(model)
    return model


def write(model: PreTrainedModel, folder: Path, dtype: torch.dtype, source: Path) -> None:
    save_checkpoint(model, model.named_parameters(), folder, dtype, source)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_saved_model_has_the_trained_models_logits(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-000001"
    write(trained(source), folder, torch.float32, source)
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    before = expected(PROMPT).logits
    train_a_little(expected)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    assert torch.equal(loaded(PROMPT).logits, expected(PROMPT).logits)
    assert not torch.allclose(loaded(PROMPT).logits, before, atol=0.1)


def test_tied_weights_are_written_once_and_stay_tied(source: Path, tmp_path: Path) -> None:
    write(trained(source), tmp_path / "saved", torch.float32, source)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    is_tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert is_tied == config["tie_word_embeddings"] == ("lm_head.weight" not in tensors(tmp_path / "saved"))


def test_tensors_and_config_are_the_sources_apart_from_values(source: Path, tmp_path: Path) -> None:
    """Same names, shapes, settings; nothing of the trainer's own attention."""
    write(trained(source), tmp_path / "saved", torch.float32, source)
    shapes, expected = (
        {name: tensor.shape for name, tensor in tensors(folder).items()} for folder in (tmp_path / "saved", source)
    )
    assert shapes == expected
    saved, original = ((folder / "config.json").read_text() for folder in (tmp_path / "saved", source))
    assert json.loads(saved) == json.loads(original)


def test_bfloat16_is_rounded_from_the_masters_which_stay(tiny_folder: Path, tmp_path: Path) -> None:
    model = trained(tiny_folder)
    masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    write(model, tmp_path / "saved", torch.bfloat16, tiny_folder)
    saved = tensors(tmp_path / "saved")
    assert saved.keys() == masters.keys()
    assert all(torch.equal(saved[name], master.bfloat16()) for name, master in masters.items())
    assert all(torch.equal(parameter, masters[name]) for name, parameter in model.named_parameters())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto").dtype == torch.bfloat16


def test_tokenizer_files_come_along(tiny_folder: Path, tmp_path: Path) -> None:
    write(trained(tiny_folder), tmp_path / "saved", torch.float32, tiny_folder)
    assert names(tmp_path / "saved") == names(tiny_folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "saved" / name).read_bytes() == (tiny_folder / name).read_bytes()
    chat = [{"role": "user", "content": "hi"}]
    saved, original = (
        AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, tokenize=False)
        for folder in (tmp_path / "saved", tiny_folder)
    )
    assert saved == original


@pytest.mark.parametrize("failing", ["save_file", "sync_tree"])
def test_a_crash_leaves_no_folder_of_the_final_name(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    folder = tmp_path / "checkpoints" / "step-000001"
    model = trained(tiny_folder)
    with monkeypatch.context() as broken:
        broken.setattr(checkpoint, failing, full)
        with pytest.raises(OSError, match="No space left"):
            write(model, folder, torch.float32, tiny_folder)
    assert not folder.exists()
    assert not list(folder.parent.glob("step*"))

    left_over = folder.with_name(".step-000001.partial") / "left_over"
    left_over.touch()
    write(model, folder, torch.float32, tiny_folder)
    assert names(folder) == names(tiny_folder)
    assert names(folder.parent) == {folder.name}


def test_everything_is_on_disk_before_the_name_appears(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "saved"
    synced: list[tuple[str, bool]] = []
    monkeypatch.setattr(checkpoint, "sync", lambda path: synced.append((path.name, folder.exists())))
    write(trained(tiny_folder), folder, torch.float32, tiny_folder)
    assert {name for name, appeared in synced if not appeared} == names(folder) | {".saved.partial"}
    assert synced[-1] == (tmp_path.name, True)


def test_the_template_that_was_used_comes_along(tiny_folder: Path, tmp_path: Path) -> None:
    """The tiny tokenizer's own template says <|user|> and the like."""
    file = tmp_path / "plain.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    model = trained(tiny_folder)
    save_checkpoint(model, model.named_parameters(), tmp_path / "saved", torch.float32, tiny_folder, str(file))
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert loaded.apply_chat_template([{"role": "user", "content": "2 + 3?"}], tokenize=False) == "2 + 3?!"
