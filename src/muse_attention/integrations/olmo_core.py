"""MuSe in OLMo-core 3.0: replace the backend of the attention layers after the model is built.

    model = model_config.build(init_device="meta")
    use_muse(model)
    train_module = train_module_config.build(model)

Documents are those of `cu_doc_lens`, which OLMo-core makes where the data loader gives document lengths. Its Ulysses
context parallelism works, with fewer key heads than ranks too.
"""

from __future__ import annotations

from typing import Any

from olmo_core.nn.attention import Attention, AttentionBackend
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from muse_attention.config import MuSeConfig
from muse_attention.core.sinks import with_sinks
from muse_attention.integrations.rows import attend_to_rows, check_config

NO_WINDOW = (-1, -1)
"""`window_size` of a layer that attends to all of the past."""


def use_muse(model: nn.Module, config: MuSeConfig | str | None = None) -> list[str]:
    """Replace the backend of every attention layer, save those with a sliding window, which keep theirs.

    Call it before the model is parallelised, so before the train module is built.

    Args:
        model: of OLMo-core
        config: as for `muse_attn_varlen_func`: None attends exactly to documents of up to 8k tokens

    Returns:
        The names of the layers that have MuSe now.
    """
    check_config(config)
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Attention) and module.backend.window_size == NO_WINDOW
    }
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention layer of OLMo-core without a sliding window")
    for name, layer in layers.items():
        if layer.backend.cp_enabled:
            raise ValueError(f"{name} has context parallelism already: call use_muse before it is applied")
        if layer.backend.dropout_p > 0:
            raise ValueError(f"{name} has attention dropout, which MuSe does not support: set dropout=0")
    for layer in layers.values():
        own = layer.backend
        layer.backend = MuSeAttentionBackend(
            config=config, head_dim=own.head_dim, n_heads=own.n_heads, n_kv_heads=own.n_kv_heads, scale=own.scale
        )
    return list(layers)


class MuSeAttentionBackend(AttentionBackend):
    """Causal MuSe attention as a backend of OLMo-core."""

    def __init__(self, *, config: MuSeConfig | str | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.config = config
        self.mesh: DeviceMesh | None = None

    @classmethod
    def assert_supported(cls) -> None:
        pass

    @classmethod
    def assert_supports_swa(cls) -> None:
        raise ValueError("MuSe has no sliding windows: layers with one keep the backend that they have")

    @classmethod
    def assert_supports_ring_cp(cls) -> None:
        raise ValueError("MuSe clusters whole sequences: use Ulysses context parallelism, not a ring")

    @classmethod
    def assert_supports_ulysses_cp(cls) -> None:
        pass

    @classmethod
    def assert_supports_packed_qkv(cls) -> None:
        raise ValueError("MuSe takes queries, keys and values as three tensors, not as one")

    @classmethod
    def assert_supports_kv_cache(cls) -> None:
        raise ValueError("MuSe is for training: generate with a backend of exact attention")

    def apply_cp(self, cp_mesh: DeviceMesh, ring: Any = None, uly: Any = None) -> None:
        super().apply_cp(cp_mesh, ring=ring, uly=uly)
        self.mesh = cp_mesh

    def forward(
        self,
        qkv: Tensor | tuple[Tensor, Tensor, Tensor],
        cu_doc_lens: Tensor | None = None,
        cu_doc_lens_q: Tensor | None = None,
        cu_doc_lens_k: Tensor | None = None,
        max_doc_len: int | None = None,
        max_doc_len_q: int | None = None,
        max_doc_len_k: int | None = None,
        local_k_slice: slice | None = None,
        kv_cache_manager: Any = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """(batch, length, heads, head_dim), from queries, keys and values of this layout."""
        del max_doc_len, max_doc_len_q, max_doc_len_k  # the boundaries say it
        if isinstance(qkv, Tensor):
            self.assert_supports_packed_qkv()
        if kv_cache_manager is not None:
            self.assert_supports_kv_cache()
        if any(argument is not None for argument in (cu_doc_lens_q, cu_doc_lens_k, local_k_slice)):
            self.assert_supports_ring_cp()
        query, key, value = qkv
        out, lse = attend_to_rows(
            query, key, value, cu_doc_lens, self.config, is_causal=True, scale=self.scale, mesh=self.mesh
        )
        if sinks is not None:
            out = with_sinks(out.transpose(1, 2), lse, sinks).transpose(1, 2)
        return out.contiguous()
