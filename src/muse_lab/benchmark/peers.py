"""What attentions of other libraries need, checked before anything runs."""

from __future__ import annotations

from muse_attention.baselines.flash_sparse import check_flash_sparse
from muse_attention.baselines.flex import check_flex
from muse_attention.baselines.nsa import check_nsa
from muse_lab.benchmark.request import BenchmarkRequest


def check_peer(request: BenchmarkRequest, device: str, *, is_causal: bool) -> None:
    """Raise ValueError if an attention of another library cannot serve the request."""
    kind, _, _ = request.attention.partition(":")
    if kind == "flex_attention":
        check_flex(device)
    elif kind == "flash_sparse_attn":
        check_flash_sparse(device)
    elif kind == "nsa":
        check_nsa(device, request.shape.heads, request.shape.key_heads, is_causal=is_causal)
