"""Two gigabytes off a GPU and back."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def test_the_device_gets_its_memory_back() -> None:
    from profiling.bench.offload import measure

    found = measure(gib=2.0)
    print(found)
    assert found.equal
    assert found.returned >= 0.95
