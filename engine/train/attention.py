"""Attention over packed sequences, through the model library's attention interface.

Linear layers run on the packed tokens; attention runs per sequence, so no token sees a packed neighbour. Sequences are
scattered into a [S, T_max] block for one batched causal SDPA call and gathered back.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED_ATTENTION = "farfield_packed"


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    pack_index: torch.Tensor,
    pack_shape: tuple[int, int],
    **_: object,
) -> tuple[torch.Tensor, None]:
    """query [1, H, N, D], key and value [1, H_kv, N, D] -> [1, N, H, D].

    `pack_index` int64[N] is each token's place in the flattened [S, T_max] block `pack_shape`. Padding sits at the
    end of each row, so the causal mask alone keeps it from every real token.
    """
    num_sequences, longest = pack_shape
    # On a CPU the kernels for float32 attention are faster than those for bfloat16, and exact besides.
    computed = torch.float32 if query.device.type == "cpu" else query.dtype

    def block(packed: torch.Tensor) -> torch.Tensor:
        heads, width = packed.shape[1], packed.shape[3]
        flat = packed.new_zeros(num_sequences * longest, heads, width, dtype=computed)
        flat = flat.index_copy(0, pack_index, packed[0].transpose(0, 1).to(computed))
        return flat.view(num_sequences, longest, heads, width).transpose(1, 2)

    with torch.autocast(query.device.type, enabled=False):
        output = scaled_dot_product_attention(
            block(query), block(key), block(value), is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=True
        )
    heads, width = output.shape[1], output.shape[3]
    packed = output.transpose(1, 2).reshape(num_sequences * longest, heads, width).index_select(0, pack_index)
    return packed.to(query.dtype).unsqueeze(0), None


def pack_layout(cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
    """`pack_index` and `pack_shape` for sequences that start and end at `cu_seqlens` int[S+1]."""
    lengths = cu_seqlens.diff()
    longest = int(lengths.max())
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=cu_seqlens.device), lengths)
    columns = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device) - cu_seqlens[:-1].repeat_interleave(lengths)
    return rows * longest + columns, (len(lengths), longest)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
