"""Storages emptied and filled again, on a CPU: the same code moves a GPU's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from engine.config import TrainSection
from engine.errors import ConfigError
from engine.train.offload import Offload, require_device

CPU = torch.device("cpu")


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.clone().reshape(-1).view(torch.uint8).numpy().tobytes()  # numpy would pin down the storage


def test_what_was_away_is_bit_equal_and_was_really_freed() -> None:
    odd = torch.tensor([float("nan"), -0.0, 1e-45, float("inf")])
    whole = torch.randn(7, 3).to(torch.bfloat16)
    row, scalar = whole[2], torch.tensor(3.0)
    before = [bits(tensor) for tensor in (odd, whole, row, scalar)]
    offload = Offload(CPU)
    offload.out([odd, row, scalar])
    assert [tensor.untyped_storage().nbytes() for tensor in (odd, whole, row, scalar)] == [0] * 4
    assert offload.away
    offload.back()
    assert [bits(tensor) for tensor in (odd, whole, row, scalar)] == before
    assert row.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert not offload.away


def test_tied_parameters_stay_one_and_move_once() -> None:
    body, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = body.weight
    offload = Offload(CPU)
    offload.out([body.weight, head.weight])
    assert len(offload._away) == 1
    offload.back()
    with torch.no_grad():
        body.weight.fill_(7.0)
    assert head.weight.tolist() == [[7.0] * 3] * 5


def test_buffers_are_used_again_whatever_comes_in_between() -> None:
    moments, weights = [torch.ones(4), torch.ones(4)], [torch.ones(4), torch.ones(9)]
    offload = Offload(CPU)

    def buffers() -> set[int]:
        return {buffer.data_ptr() for _, buffer in offload._away}

    offload.out(moments)
    of_moments = buffers()
    offload.out([*moments, *weights])  # more of it, the first still away
    everything = buffers()
    assert (len(of_moments), len(everything)) == (2, 4)
    assert of_moments < everything
    offload.back()
    for chosen in (weights, [*moments, *weights]):
        offload.out(chosen)
        assert buffers() <= everything
        offload.back()
    assert [tensor.tolist() for tensor in (*moments, *weights)] == [[1.0] * 4] * 3 + [[1.0] * 9]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_shards_move_and_train_on() -> None:
    """FSDP keeps a flat view of every shard beside the parameter: both must see the same memory again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain, sharded = nn.Linear(6, 4), nn.Linear(6, 4)
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    offload, given = Offload(CPU), torch.randn(3, 6)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (plain, sharded)]
    for _ in range(3):
        for model, optimizer in zip((plain, sharded), optimizers, strict=True):
            model(given).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        states = [value for state in optimizers[1].state.values() for value in state.values()]
        offload.out([*sharded.parameters(), *states])
        shard = sharded.weight.to_local()  # pyright: ignore[reportCallIssue]
        assert shard.untyped_storage().nbytes() == 0
        offload.back()
    full = sharded.weight.full_tensor()  # pyright: ignore[reportCallIssue]
    torch.testing.assert_close(full, plain.weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("what", ["optimizer", "all"])
def test_without_a_gpu_it_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    require_device(TrainSection())
    with pytest.raises(ConfigError, match=f"train.offload = '{what}': this machine has no GPU"):
        require_device(TrainSection(offload=what))  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    require_device(TrainSection(offload=what))  # pyright: ignore[reportArgumentType]
