"""Weights have one name, on their way and in files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.weights.digest import WeightsDigest, folder_digest

WEIGHTS = {"b": torch.tensor([[1.0, 2.0], [3.0, 4.001]]), "a": torch.tensor([5.0])}


def whole(weights: dict[str, torch.Tensor]) -> str:
    digest = WeightsDigest()
    for name, tensor in weights.items():
        digest.add(name, tensor)
    return digest.hexdigest()


def test_by_hand():
    a, b = (hashlib.sha256(WEIGHTS[name].numpy().tobytes()).digest() for name in ("a", "b"))
    assert whole(WEIGHTS) == hashlib.sha256(b"a" + a + b"b" + b).hexdigest()


def test_order_and_layout_make_no_difference_and_names_and_numbers_do():
    turned = {"a": WEIGHTS["a"], "b": WEIGHTS["b"].T.contiguous().T}
    assert whole(turned) == whole(WEIGHTS)
    assert whole({"a": WEIGHTS["b"], "b": WEIGHTS["a"]}) != whole(WEIGHTS)
    assert whole(WEIGHTS | {"a": torch.tensor([5.5])}) != whole(WEIGHTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_have_the_digest_of_what_the_engine_holds(tmp_path: Path, dtype: torch.dtype):
    save_file({"b": WEIGHTS["b"]}, tmp_path / "model-1.safetensors")
    save_file({"a": WEIGHTS["a"]}, tmp_path / "model-2.safetensors")
    assert folder_digest(tmp_path, dtype) == whole({name: tensor.to(dtype) for name, tensor in WEIGHTS.items()})


def test_older_files_have_a_name_too(tmp_path: Path):
    digests = set()
    for content in (b"one", b"two"):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
        digests.add(folder_digest(tmp_path, torch.float32))
    assert len(digests) == 2
