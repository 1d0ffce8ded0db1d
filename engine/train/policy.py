"""The policy as the training step runs it: one forward to hidden states, sharded or replicated over ranks by FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers.modeling_utils import PreTrainedModel

from engine.train.attention import pack_layout


class Policy(torch.nn.Module):
    """Hidden states by `forward`, logits by `logits`: the head is no part of the forward, so that it can run in chunks.

    Embedding, last norm and head belong to this module's own FSDP group, which stays gathered from its forward to the
    end of its backward: the head's weight is whole in between.
    """

    def __init__(self, model: PreTrainedModel, *, head_in_float32: bool) -> None:
        super().__init__()
        self.model = model
        self._head_in_float32 = head_in_float32

    def forward(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> torch.Tensor:
        """Packed int64[N], int64[N], int64[S+1] -> hidden states [1, N, D]."""
        index, shape = pack_layout(cu_seqlens)
        output = self.model.base_model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            use_cache=False,
            pack_index=index,
            pack_shape=shape,
        )
        return output.last_hidden_state

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """float32[T, V]. Under autocast the head's product is in its dtype too, unless `model.lm_head_dtype` is float32
        (ScaleRL, arXiv 2510.13786, which makes the engine and the trainer agree)."""
        head = self.model.get_output_embeddings()
        assert isinstance(head, torch.nn.Linear)
        if not self._head_in_float32:
            return linear(hidden_TD, head.weight).float()
        with torch.autocast(hidden_TD.device.type, enabled=False):
            return linear(hidden_TD.float(), head.weight.float())

    def shard(self, device: torch.device, ranks: int, *, shard: bool) -> None:
        """Spread over the default process group: parameters, gradients and optimizer state cut into `ranks` parts, or
        (`shard` false) a copy on each rank. Gradients are summed, not averaged: weights already carry 1 / count."""
        shape, names = ((ranks,), ("shard",)) if shard else ((ranks, 1), ("replicate", "shard"))
        mesh: DeviceMesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        layers = self.model.base_model.get_submodule("layers")
        for module in (*layers.children(), self):
            fully_shard(module, mesh=mesh)
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                # gloo has no operation that scales while it reduces.
                module.set_force_sum_reduction_for_comms(True)
                # A rank without a token in this round has no gradient of the head: the others' reduction counts on it.
                module.set_reduce_scatter_unused_params(True)

    def reduce_gradients(self, now: bool) -> None:
        """Whether the next backward sums gradients over ranks; until then they gather on each. For copies only: shards
        are reduced every time, since keeping whole gradients is what sharding avoids."""
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(now)

    def release(self) -> None:
        """Drop what was gathered from other ranks: a forward without a backward leaves embedding and head whole."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's parameters by name, whole and detached, one at a time. Every rank must run through it."""
        for name, parameter in self.model.named_parameters():
            yield name, full_tensor(parameter.detach())


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor; a collective if it is spread over ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Forward and backward in `dtype` over float32 masters."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)
