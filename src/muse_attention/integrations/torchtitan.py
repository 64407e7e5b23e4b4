"""MuSe in torchtitan 0.3, by its overrides:

    --override.imports muse_attention.integrations.torchtitan.muse
    --override.imports 'muse_attention.integrations.torchtitan.muse={"config": "QK64R8B1k"}'

The override replaces the inner attention of every layer. Layers with a sliding window keep their own. Documents are
those of torchtitan's `VarlenMetadata`, which the trainer makes from positions that restart.

    --override.imports muse_attention.integrations.torchtitan.muse muse_attention.integrations.torchtitan.keep_attention

The second override keeps what MuSe computed where torchtitan's selective checkpointing, its default, would run it again
in the backward pass, as it keeps the outputs of its own attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torchtitan  # noqa: F401 - the first to be missed

# isort: split
import spmd_types as spmd
import torch
from spmd_types.runtime import get_partition_spec
from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.attention import BaseAttention, FlexAttention, VarlenAttention, VarlenMetadata
from torchtitan.protocols.module import Module

from muse_attention import ops
from muse_attention.integrations.rows import attend_to_rows, check_config

CAUSAL = (-1, 0)
"""`window_size` of a layer that attends to all of the past."""


class MuSeAttention(Module):
    """Causal MuSe attention to the documents of a batch, in the place of `VarlenAttention`."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """A kind of `VarlenAttention.Config`: for those, models make the boundaries of documents."""

        config: str | None = None
        """as for `muse_attn_varlen_func`"""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config.config

    def forward(
        self,
        q_BLNH: Tensor,  # the names by which torchtitan's sharding knows the arguments
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        enable_gqa: bool = False,
        **others: Any,
    ) -> Tensor:
        """(batch, length, heads, value_dim). `out_transform` gets that and the lse, (batch, length, heads)."""
        del enable_gqa  # the shapes say so
        self._check(q_BLNH, k_BLNH, attention_masks, others)
        with spmd.no_typecheck():
            query, key = q_BLNH.to(v_BLNH.dtype), k_BLNH.to(v_BLNH.dtype)  # a norm may have made them float32
            # The boundaries on the host, where torchtitan has them, are not waited for.
            ends = attention_masks.cu_seq_q_host or attention_masks.cu_seq_q
            out, lse = attend_to_rows(query, key, v_BLNH, ends, self.config, is_causal=True, scale=scale)
            out, lse = out.to(q_BLNH.dtype), lse.transpose(1, 2)
        _type_like(q_BLNH, out, lse)
        return out if out_transform is None else out_transform(out, lse)

    @staticmethod
    def _check(query: Tensor, key: Tensor, attention_masks: Any, others: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            raise ValueError(
                "torchtitan compiles a layer as one graph, in which MuSe has not been tried: leave 'model' out "
                "of --compile.components"
            )
        if query.shape[1] != key.shape[1]:
            raise ValueError(
                "torchtitan's context parallelism gives a rank some queries and all keys, which MuSe cannot cluster: "
                "set --parallelism.context_parallel_degree 1, and split heads with tensor_parallel_degree"
            )
        if not isinstance(attention_masks, VarlenMetadata):
            raise ValueError(
                f"MuSe needs the boundaries of documents as VarlenMetadata, not {type(attention_masks).__name__}: pass "
                "what the model's get_attention_masks(positions) returns"
            )
        asked = [name for name, value in others.items() if value is not None]
        if asked:
            raise ValueError(f"MuSe attention does not know {', '.join(asked)}; use torchtitan's own for this model")


@override(target=BaseAttention.Config, description="MuSe attention")
def muse(attention: BaseAttention.Config, config: str | None = None) -> BaseAttention.Config:
    """The configuration of an attention layer with MuSe inside; unchanged if the layer has a sliding window."""
    check_config(config)
    inner = attention.inner_attention
    if isinstance(inner, VarlenAttention.Config):
        if inner.window_size != CAUSAL:
            return attention
    elif not isinstance(inner, FlexAttention.Config) or hasattr(attention, "sliding_window_size"):
        # Windows of a model with FlexAttention are in its masks, where MuSe would not see them.
        raise ValueError(
            f"MuSe cannot take the place of {type(inner).__qualname__} in {type(attention).__qualname__}: build the "
            "model with attn_backend='varlen'"
        )
    return dataclasses.replace(attention, inner_attention=derive(inner, MuSeAttention.Config, config=config))


class SelectiveACWithMuSe(SelectiveAC):
    """Selective checkpointing that saves the clusters and the outputs of MuSe."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        return {*super().get_save_ops(), ops.CLUSTER, ops.FORWARD}


@override(target=SelectiveAC.Config, exact=True, description="selective checkpointing that keeps what MuSe computed")
def keep_attention(checkpointing: SelectiveAC.Config) -> SelectiveAC.Config:
    return derive(checkpointing, SelectiveACWithMuSe.Config)


def _type_like(query: Tensor, out: Tensor, lse: Tensor) -> None:
    """For torchtitan's type checker: outputs are sharded as queries are."""
    if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
        local, spec = spmd.get_local_type(query), get_partition_spec(query)
        spmd.assert_type(out, local, spec)
        spmd.assert_type(lse, local, None if spec is None else spmd.PartitionSpec(*spec[:-1]))
