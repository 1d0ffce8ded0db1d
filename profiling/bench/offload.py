"""How fast the trainer's tensors leave a GPU and come back, and how much of its memory the driver gets.

Run: python -m profiling.bench.offload
"""

from __future__ import annotations

import sys
import time

import msgspec
import torch

from engine.train.offload import Offload

TENSORS = 64
GIB = 2**30


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """out_gb_s and back_gb_s: of the second trip, whose host buffers are there already. returned: share of the
    tensors' memory that the driver had again while they were away. equal: whether every bit came back."""

    out_gb_s: float
    back_gb_s: float
    returned: float
    equal: bool


def measure(gib: float) -> Found:
    """Move `gib` GiB of random floats, twice."""
    device = torch.device("cuda")
    tensors = [torch.randn(int(gib * GIB) // (4 * TENSORS), device=device) for _ in range(TENSORS)]
    before = [tensor.cpu() for tensor in tensors]
    size = sum(tensor.nbytes for tensor in tensors)
    offload = Offload(device)
    out_s = back_s = returned = 0.0
    for _ in range(2):
        torch.cuda.synchronize()
        free, _total = torch.cuda.mem_get_info()
        started = time.monotonic()
        offload.out(tensors)
        out_s = time.monotonic() - started
        returned = (torch.cuda.mem_get_info()[0] - free) / size
        started = time.monotonic()
        offload.back()
        back_s = time.monotonic() - started
    equal = all(torch.equal(tensor.cpu(), was) for tensor, was in zip(tensors, before, strict=True))
    return Found(out_gb_s=size / 1e9 / out_s, back_gb_s=size / 1e9 / back_s, returned=returned, equal=equal)


def main() -> int:
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU: on a CPU there is no device memory to give back", file=sys.stderr)
        return 3
    found = measure(gib=8.0)
    print(f"off the device {found.out_gb_s:.1f} GB/s, back {found.back_gb_s:.1f} GB/s, "
          f"{found.returned:.1%} of the memory returned, bits {'equal' if found.equal else 'DIFFERENT'}")
    return 0 if found.equal else 1


if __name__ == "__main__":
    sys.exit(main())
