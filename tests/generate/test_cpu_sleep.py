"""What goes back to the system when the engine sleeps on CPU, and what stays."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import torch

from engine.generate.cpu_sleep import CpuSleep

PAGE = mmap.PAGESIZE


class Worker(CpuSleep):
    """As much of vLLM's worker as the extension sees."""

    def __init__(self, kv_caches: list[torch.Tensor], model: torch.nn.Module) -> None:
        self.model_runner = SimpleNamespace(kv_caches=kv_caches)
        self.get_model = lambda: model


class Tied(torch.nn.Module):
    """Two parameters on one storage, one too small for a page, one emptied by packing, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.ones(8 * PAGE))
        self.head = torch.nn.Parameter(self.embedding.detach())
        self.norm = torch.nn.Parameter(torch.ones(3))
        self.packed = torch.nn.Parameter(torch.ones(0))
        self.register_buffer("rotary", torch.ones(8 * PAGE))


def test_only_the_cache_is_freed_and_every_view_reads_zeros():
    storage = torch.ones(64 * PAGE, dtype=torch.uint8)
    views = [storage[layer::4] for layer in range(4)]
    model = Tied()
    freed = Worker(views, model).give_pages_back(weights=False)
    assert freed in (63 * PAGE, 64 * PAGE)  # as malloc happens to align it
    assert freed <= int((storage == 0).sum()) <= 64 * PAGE
    assert all(bool(tensor.bool().all()) for tensor in model.state_dict().values())
    storage.fill_(2)
    assert all(bool((view == 2).all()) for view in views)


def test_with_weights_parameters_go_once_and_buffers_stay():
    model = Tied()
    freed = Worker([], model).give_pages_back(weights=True)
    assert freed in (31 * PAGE, 32 * PAGE)  # four bytes each, tied ones counted once
    assert int((model.embedding == 0).sum()) == freed // 4
    assert model.norm.tolist() == [1, 1, 1]
    assert bool((model.rotary == 1).all())


def test_what_shares_a_page_with_the_cache_is_untouched():
    memory = mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    whole.fill_(1)
    cache = torch.frombuffer(memory, dtype=torch.uint8, offset=100, count=3 * PAGE)
    assert Worker([cache], Tied()).give_pages_back(weights=False) == 2 * PAGE
    assert whole.view(4, PAGE).float().mean(1).tolist() == [1, 0, 0, 1]
