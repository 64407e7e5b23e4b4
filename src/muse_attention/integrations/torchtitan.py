"""MuSe in torchtitan 0.3, through its overrides:

    --override.imports muse_attention.integrations.torchtitan.muse
    --override.imports 'muse_attention.integrations.torchtitan.muse={"config": "QK64R8B1k"}'

The override replaces the inner attention of every layer. Layers with a sliding window keep their own. Documents are
those of torchtitan's `VarlenMetadata`, which the trainer makes from positions that restart.

    --override.imports muse_attention.integrations.torchtitan.muse_ulysses --parallelism.context_parallel_degree 8
    --parallelism.context_parallel_load_balancer None

`muse_ulysses` is for context parallelism. torchtitan 0.3 gives a rank some queries and all keys, which cannot be
clustered, and it shards no `VarlenMetadata`. So this override leaves keys and values sharded as queries are, exchanges
sequence for heads over torchtitan's mesh (`muse_attention.distributed`), and reads documents from the positions.

    --override.imports muse_attention.integrations.torchtitan.muse muse_attention.integrations.torchtitan.keep_attention

The last override keeps what MuSe computed where torchtitan's selective checkpointing, its default, would run it again
in the backward pass, as it keeps the outputs of its own attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torchtitan  # noqa: F401 - first, so that the error names it

# isort: split
import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types.runtime import get_partition_spec
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import derive, override
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.attention import BaseAttention, FlexAttention, VarlenAttention, VarlenMetadata
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig

from muse_attention import ops
from muse_attention.documents import operator
from muse_attention.documents.arguments import find_documents
from muse_attention.documents.boundaries import DocumentBoundaries
from muse_attention.integrations.rows import attend_as_one_row, attend_to_rows, check_config

CAUSAL = (-1, 0)
"""`window_size` of a layer that attends to all of the past."""


class _InnerAttention(Module):
    """What torchtitan calls. A subclass says what the masks are, and attends."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config: str | None = config.config

    def forward(
        self,
        q_BLNH: Tensor,  # the names by which torchtitan's sharding knows the arguments
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        enable_gqa: bool = False,
        **others: Any,
    ) -> Tensor:
        """(batch, length, heads, value_dim). `out_transform` gets that and the lse, (batch, length, heads)."""
        del enable_gqa  # the shapes say so
        asked = [name for name, value in others.items() if value is not None]
        if asked:
            raise ValueError(f"MuSe attention does not support {', '.join(asked)}; use torchtitan's own for this model")
        with spmd.no_typecheck():
            query, key = q_BLNH.to(v_BLNH.dtype), k_BLNH.to(v_BLNH.dtype)  # a norm may have made them float32
            out, lse = self.attend(query, key, v_BLNH, attention_masks, scale)
            out, lse = out.to(q_BLNH.dtype), lse.transpose(1, 2)
        _type_like(q_BLNH, out, lse)
        return out if out_transform is None else out_transform(out, lse)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, masks: Any, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """As `attend_to_rows`."""
        raise NotImplementedError


class MuSeAttention(_InnerAttention):
    """Causal MuSe attention to the documents of a batch, in place of `VarlenAttention`."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """A `VarlenAttention.Config`, for which models make the boundaries of documents."""

        config: str | None = None
        """as for `muse_attn_varlen_func`"""

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        if parallel_dims.cp_enabled:
            raise ValueError(
                "context parallelism needs another override: --override.imports "
                "muse_attention.integrations.torchtitan.muse_ulysses"
            )
        super().parallelize(parallel_dims)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, masks: Any, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        if not isinstance(masks, VarlenMetadata):
            raise ValueError(
                f"MuSe needs the boundaries of documents as VarlenMetadata, not {type(masks).__name__}: pass what the "
                "model's get_attention_masks(positions) returns"
            )
        if torch.compiler.is_compiling():
            return attend_as_one_row(query, key, value, masks.cu_seq_q, self.config, True, scale)
        # The boundaries on the host, where torchtitan has them, are not waited for.
        ends = masks.cu_seq_q_host or masks.cu_seq_q
        return attend_to_rows(query, key, value, ends, self.config, is_causal=True, scale=scale)


class MuSeUlyssesAttention(_InnerAttention):
    """Causal MuSe attention to sequences that lie in parts on the ranks of torchtitan's context parallelism.

    Its masks are the positions of this rank's tokens, (batch, length).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Not a `VarlenAttention.Config`, for which torchtitan would make boundaries, and fail to shard them."""

        config: str | None = None
        """as for `muse_attn_varlen_func`"""

    mesh: DeviceMesh | None = None

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        if parallel_dims.spmd_backend != "spmd_types":
            raise ValueError(
                f"MuSe does not support spmd_backend={parallel_dims.spmd_backend!r}: set --parallelism.spmd_backend "
                "spmd_types"
            )
        self.mesh = parallel_dims.get_optional_mesh("cp")
        super().parallelize(parallel_dims)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, masks: Any, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            raise ValueError(
                "with context parallelism MuSe reads documents from the positions, which a compiled layer cannot: "
                "leave 'model' out of --compile.components"
            )
        documents = _documents_of_whole_rows(masks, self.mesh)
        return attend_to_rows(query, key, value, documents, self.config, is_causal=True, scale=scale, mesh=self.mesh)


def _documents_of_whole_rows(positions: Tensor, mesh: DeviceMesh | None) -> DocumentBoundaries | None:
    """Documents by the positions of this rank's tokens, (batch, length / ranks). None if each row is one document.

    Collective: every rank of the mesh must call it. The host waits for the positions, in every layer.
    """
    if not isinstance(positions, Tensor):
        raise ValueError("MuSe reads documents from positions, and got none: use a data loader that provides them")
    if mesh is not None:
        parts = [torch.empty_like(positions) for _ in range(mesh.size())]
        dist.all_gather(parts, positions.contiguous(), group=mesh.get_group())
        positions = torch.cat(parts, 1)
    positions = positions.cpu()
    previous, following = positions[:, :-1], positions[:, 1:]
    if not bool(((following == previous + 1) | (following == 0)).all()):
        raise ValueError(
            "positions neither continue nor restart at 0, as with load-balanced context parallelism: set "
            "--parallelism.context_parallel_load_balancer None"
        )
    batch, length = positions.shape
    return find_documents(batch, length, {"position_ids": positions})


@override(target=BaseAttention.Config, description="MuSe attention")
def muse(attention: BaseAttention.Config, config: str | None = None) -> BaseAttention.Config:
    """The configuration of an attention layer with MuSe inside; unchanged if the layer has a sliding window."""
    check_config(config)
    if _has_window(attention):
        return attention
    inner = derive(attention.inner_attention, MuSeAttention.Config, config=config)
    return dataclasses.replace(attention, inner_attention=inner)


@override(target=BaseAttention.Config, description="MuSe attention over the ranks of context parallelism")
def muse_ulysses(attention: BaseAttention.Config, config: str | None = None) -> BaseAttention.Config:
    """The configuration of an attention layer with MuSe inside, for sequences in parts on several ranks."""
    check_config(config)
    if _has_window(attention):
        raise ValueError(
            "a layer with a sliding window has no context parallelism with MuSe: use torchtitan's own attention, or "
            "--parallelism.context_parallel_degree 1 and the override muse"
        )
    inner = attention.inner_attention
    sharding = _sharding_of_parts(inner.sharding_config)
    return derive(
        attention,
        _handing_positions(type(attention)),
        inner_attention=derive(inner, MuSeUlyssesAttention.Config, config=config, sharding_config=sharding),
    )


def _has_window(attention: BaseAttention.Config) -> bool:
    """Whether it has a sliding window. FlexAttention's are in its masks, where MuSe would not see them: refused."""
    inner = attention.inner_attention
    if isinstance(inner, VarlenAttention.Config):
        return inner.window_size != CAUSAL
    if not isinstance(inner, FlexAttention.Config) or hasattr(attention, "sliding_window_size"):
        raise ValueError(
            f"MuSe cannot replace {type(inner).__qualname__} in {type(attention).__qualname__}: build the "
            "model with attn_backend='varlen', which context parallelism does not support"
        )
    return False


def _sharding_of_parts(sharding: ShardingConfig | None) -> ShardingConfig | None:
    """torchtitan's sharding of an inner attention, but keys and values stay in parts, as queries do."""
    if sharding is None or sharding.in_src_shardings is None:
        return sharding
    placements = tuple(sharding.in_src_shardings.values())
    return dataclasses.replace(
        sharding,
        in_dst_shardings=sharding.in_src_shardings,
        local_map=LocalMapConfig(in_grad_placements=placements),
    )


def _handing_positions(config: type[BaseAttention.Config]) -> type[BaseAttention.Config]:
    """A configuration whose layers hand positions to their inner attention, where masks would be.

    A layer hands on masks only, and torchtitan makes none here.
    """

    def build(self: BaseAttention.Config, **arguments: Any) -> Any:
        layer = config.build(self, **arguments)
        layer.register_forward_pre_hook(_masks_are_positions)
        return layer

    return dataclass(kw_only=True, slots=True)(type(f"{config.__name__}WithPositions", (config,), {"build": build}))


def _masks_are_positions(layer: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, _, positions = arguments
    return hidden, positions, positions


class SelectiveACWithMuSe(SelectiveAC):
    """Selective checkpointing that saves the clusters and the outputs of MuSe."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        return {*super().get_save_ops(), ops.CLUSTER, ops.FORWARD, operator.FORWARD}


@override(target=SelectiveAC.Config, exact=True, description="selective checkpointing that keeps what MuSe computed")
def keep_attention(checkpointing: SelectiveAC.Config) -> SelectiveAC.Config:
    return derive(checkpointing, SelectiveACWithMuSe.Config)


def _type_like(query: Tensor, out: Tensor, lse: Tensor) -> None:
    """For torchtitan's type checker: outputs are sharded as queries are."""
    if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
        local, spec = spmd.get_local_type(query), get_partition_spec(query)
        spmd.assert_type(out, local, spec)
        spmd.assert_type(lse, local, None if spec is None else spmd.PartitionSpec(*spec[:-1]))
