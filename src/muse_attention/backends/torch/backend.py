"""The backend `torch`, for any device. Large logits are computed in float64.

The backward pass recomputes the weights from the lse: `p = exp(s - L)`. In float32 an `L` of 600 is rounded by up to
3e-5, and so is every weight. Plain PyTorch keeps the weights and has no such error. So a float32 call on a CPU whose
lse turns out large is computed again in float64, and its lse is kept in float64 for the backward pass. On a GPU that
check would wait for the device, so float32 is computed in float32 there. Blockwise MuSe takes the results in float64
from the first large lse of each head on, so that no later token changes a bit of an earlier output.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from muse_attention.backends.protocol import Backend
from muse_attention.backends.torch import blockwise, far_field
from muse_attention.backends.torch.block_choice import choose_blocks
from muse_attention.backends.torch.clustering import find_clusters
from muse_attention.config import MuSeConfig
from muse_attention.core import local
from muse_attention.core.call import Attended, Call, without_far_field
from muse_attention.core.precision import compute_dtype
from muse_attention.core.structures import Clusters, Partial, Selection

LARGEST_LSE = 64.0
"""From here on, float32 would cost the weights six of their 24 bits."""


class TorchBackend(Backend):
    def find_clusters(
        self, query: Tensor, key: Tensor, config: MuSeConfig, *, is_causal: bool, scale: float
    ) -> Clusters:
        if config.tolerance is None:
            return find_clusters(query, key, config, scale=scale)
        return blockwise.find_clusters(query, key, config, is_causal=is_causal, scale=scale)

    def choose_blocks(self, query: Tensor, means: Tensor, config: MuSeConfig, *, is_causal: bool) -> Selection:
        return choose_blocks(query, means, config, is_causal=is_causal)

    def forward(self, call: Call, chosen: Selection | None) -> Attended:
        attended = _forward(call, chosen)
        if self._is_too_coarse(call.query, attended.merged.lse):
            attended = _in_float64(call, attended, chosen)
        out, lse = attended.merged.out.to(call.query.dtype), attended.merged.lse.to(self.lse_dtype(call.query))
        return attended._replace(merged=Partial(out, lse))

    def backward(
        self, call: Call, attended: Attended, grad_out: Tensor, grad_lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients, in the precision of the result of `forward`."""
        merged, of_inputs = attended.merged, call.query.dtype
        dtype = torch.float64 if self._is_too_coarse(call.query, merged.lse) else of_inputs
        wide = compute_dtype(dtype)
        call, grad_out = _in_dtype(call, dtype), grad_out.to(dtype)
        grad_lse = None if grad_lse is None else grad_lse.to(wide)
        merged = Partial(merged.out.to(dtype), merged.lse.to(wide))
        gradients = local.attend_backward(call, merged, grad_out, grad_lse)
        if call.has_far_field:
            method = far_field if call.config.tolerance is None else blockwise
            gradients = method.attend_backward(gradients, call, merged, attended.selection, grad_out, grad_lse)
        grad_query, grad_key, grad_value = (gradient.to(of_inputs) for gradient in gradients)
        return grad_query, grad_key, grad_value

    def lse_dtype(self, query: Tensor) -> torch.dtype:
        """float64 where it may have been computed so."""
        may_repeat = query.dtype == torch.float32 and query.device.type == "cpu"
        return torch.float64 if may_repeat else compute_dtype(query.dtype)

    def _is_too_coarse(self, query: Tensor, lse: Tensor) -> bool:
        """Whether a call may be repeated in float64, and has to be."""
        return self.lse_dtype(query) != compute_dtype(query.dtype) and bool(_is_large(lse).any())

    def memory_size(self, call: Call, retrieved: Tensor) -> int:
        return 0

    def sequences_at_once(self, heads: int) -> int:
        return 1


def _forward(call: Call, chosen: Selection | None) -> Attended:
    own = local.attend(call)
    if not call.has_far_field:
        return without_far_field(call, own, chosen)
    method = far_field if call.config.tolerance is None else blockwise
    merged, selected = method.attend(own, call, chosen)
    return Attended(merged, selected, call.query.new_empty(0, dtype=torch.int32))


def _in_float64(call: Call, narrow: Attended, chosen: Selection | None) -> Attended:
    """In float64. Strictly causal calls keep the selection, and the outputs before each head's first large lse."""
    if call.config.tolerance is None or not call.is_causal:
        return _forward(_in_dtype(call, torch.float64), chosen)
    wide = _forward(_in_dtype(call, torch.float64), narrow.selection)
    since = _is_large(narrow.merged.lse).cumsum(-1) > 0
    out = torch.where(since[..., None], wide.merged.out, narrow.merged.out)
    return wide._replace(merged=Partial(out, torch.where(since, wide.merged.lse, narrow.merged.lse)))


def _is_large(lse: Tensor) -> Tensor:
    """Where a lse is too large for float32, or not finite."""
    return ~(lse.abs() <= LARGEST_LSE)


def _in_dtype(call: Call, dtype: torch.dtype) -> Call:
    if call.query.dtype == dtype:
        return call
    return replace(call, query=call.query.to(dtype), key=call.key.to(dtype), value=call.value.to(dtype))
