"""What names weights: the same digest for the same numbers, on their way to an engine and in a checkpoint's files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import safe_open


class WeightsDigest:
    """SHA-256 over the names and digests of tensors, sorted by name: in whatever order they come."""

    def __init__(self) -> None:
        self._tensors: dict[str, bytes] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """`tensor` as the engine holds it."""
        flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        self._tensors[name] = hashlib.sha256(flat.numpy().data).digest()

    def hexdigest(self) -> str:
        running = hashlib.sha256()
        for name, digest in sorted(self._tensors.items()):
            running.update(name.encode() + digest)
        return running.hexdigest()


def folder_digest(folder: Path, dtype: torch.dtype) -> str:
    """Of the weights in a Hugging Face folder, in the dtype that an engine loads them in. A folder of older files than
    safetensors is named by the files themselves."""
    whole, files = WeightsDigest(), sorted(folder.glob("*.safetensors"))
    for path in files:
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # it is no dictionary
                whole.add(name, tensors.get_tensor(name).to(dtype))
    for path in sorted(folder.glob("*.bin")) if not files else ():
        whole.add(path.name, torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8))
    return whole.hexdigest()
