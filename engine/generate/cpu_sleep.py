"""Sleep on CPU, where vLLM's own gives nothing back: the worker's pages go back to the system.

`madvise(MADV_DONTNEED)` keeps the address space and frees the pages behind it; the next touch finds zeros. Emptying the
storages (`resize_(0)`) and growing them again returns as much and costs the same (.06 s a GiB to give back, .2 s to
touch again), but depends on the allocator to let go, leaves views without memory, and needs a second call to wake up.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

_MADV_DONTNEED = 4


class CpuSleep:
    """Mixed into vLLM's worker (`worker_extension_cls`); an extension of one's own inherits it."""

    def give_pages_back(self, *, weights: bool) -> int:
        """Free the KV cache's memory, and with `weights` that of every parameter: all that a weight update restores,
        and no buffer. Linear layers keep their packed copies, which are the library's. Returns the bytes freed."""
        worker: Any = self
        tensors = [*worker.model_runner.kv_caches, *(worker.get_model().parameters() if weights else ())]
        # Views share a storage, as tied weights do.
        storages = {storage.data_ptr(): storage.nbytes() for storage in (each.untyped_storage() for each in tensors)}
        return sum(_give_back(*each) for each in storages.items())


def _give_back(address: int, size: int) -> int:
    """Whole pages only: what lies beside the storage on its first and last page is not ours."""
    page = mmap.PAGESIZE
    first, last = -(-address // page) * page, (address + size) // page * page
    if last <= first:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise")
    return last - first
