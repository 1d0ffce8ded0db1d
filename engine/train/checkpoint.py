"""Checkpoints as Hugging Face folders: written aside, synced, renamed. A folder of the final name is whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.modeling_utils import PreTrainedModel

_FROM_SOURCE = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt", "*.model",
                "generation_config.json")


def save_checkpoint(
    model: PreTrainedModel, parameters: Iterable[tuple[str, torch.Tensor]], folder: Path, dtype: torch.dtype,
    source_folder: Path, chat_template: str = "",
) -> None:
    """Write `folder` so that `transformers` and vLLM load it as it is.

    `parameters` are the model's, by name and whole; tied ones come once. Tokenizer files come from `source_folder`
    unchanged, but for the chat template if the file `chat_template` took its place.
    """
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    stored = model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in stored)
    plain = {name: tensor.detach().to(dtype).contiguous().cpu() for name, tensor in chain(parameters, buffers)}
    save_file(plain, aside / "model.safetensors", metadata={"format": "pt"})
    config = model.config.__class__.from_dict(model.config.to_dict())
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(aside)
    for pattern in _FROM_SOURCE:
        for file in source_folder.glob(pattern):
            shutil.copy(file, aside / file.name)
    if chat_template:
        # This file comes before what the tokenizer's own configuration says.
        shutil.copy(Path(chat_template).expanduser(), aside / "chat_template.jinja")
    sync_tree(aside)
    aside.rename(folder)
    sync(folder.parent)


def sync_tree(folder: Path) -> None:
    """Force every file of a flat folder, and the folder, to disk."""
    for file in folder.iterdir():
        sync(file)
    sync(folder)


def sync(path: Path) -> None:
    """fsync a file or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
