"""Tensors that leave the device while somebody else has it, and come back.

What moves is the storage below a tensor: it is emptied and filled again in place. The tensor, its aliases, the other
end of a tie, the optimizer's reference and what FSDP keeps of a shard stay the objects that they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from engine.config import TrainSection
from engine.errors import ConfigError


def require_device(train: TrainSection) -> None:
    """Refuse `train.offload` where nothing but the host's own memory could be freed.

    Raises:
        ConfigError: there is no GPU.
    """
    if train.offload != "none" and not torch.cuda.is_available():
        raise ConfigError("train.offload", value=train.offload, limit="this machine has no GPU to take the memory from",
                          remedy="remove it: on CPUs generator and trainer share one memory")


class Offload:
    """What is off `device`, in pinned host buffers that are made once and used again, one per storage (the host
    allocator rounds each up to a power of two)."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spare: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    @property
    def away(self) -> bool:
        """Whether anything is off the device."""
        return bool(self._away)

    def out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move this rank's part of `tensors` off the device and give its memory back to the driver. Until `back` they
        may not be read. Those that are off already stay so."""
        resident = {storage.data_ptr(): storage for storage in map(_storage, tensors) if storage.nbytes()}
        leaving = [(storage, self._buffer(storage.nbytes())) for storage in resident.values()]
        for storage, buffer in leaving:
            buffer.copy_(_content(storage), non_blocking=True)
        self._synchronize()
        for storage, _ in leaving:
            storage.resize_(0)
        self._away += leaving
        if self._on_gpu:
            torch.cuda.empty_cache()

    def back(self) -> None:
        """Bring everything back, bit by bit as it was."""
        for storage, buffer in self._away:
            storage.resize_(buffer.nbytes)
            _content(storage).copy_(buffer, non_blocking=True)
        self._synchronize()
        for _, buffer in self._away:
            self._spare[buffer.nbytes].append(buffer)
        self._away.clear()

    def _buffer(self, size: int) -> torch.Tensor:
        spare = self._spare[size]
        return spare.pop() if spare else torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu)

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    local = tensor.detach()
    return (local.to_local() if isinstance(local, DTensor) else local).untyped_storage()


def _content(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage's bytes, as a tensor upon it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
