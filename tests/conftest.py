"""Fixtures of the whole suite: small models, and a machine that computes the same everywhere."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from engine import environment

# OpenMP reads its variables once, when torch is imported: nothing above may import it.
environment.prepare()

# How long an example takes says nothing on a machine that others use too.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`build_tiny`'s model, embeddings tied, with weights large enough for every part to matter. Do not write to it."""
    return _lively(tmp_path_factory.mktemp("tiny"), tied=True)


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an output head of its own."""
    return _lively(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture
def one_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch on one CPU thread, GPUs unseen: the same bits on every machine, and little load on this one."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _lively(folder: Path, *, tied: bool) -> Path:
    import torch
    from transformers import LlamaForCausalLM

    from engine.train.model import build_tiny

    build_tiny(folder, tied=tied)
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # standard deviation .02 -> .12: logits differ by a few nats
                parameter.mul_(6.0)
    model.save_pretrained(folder)
    return folder
