"""The interface of a backend, for the operators in `ops.py`."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from muse_attention.config import MuSeConfig
from muse_attention.core.call import Attended, Call
from muse_attention.core.structures import Clusters, Selection


class Backend(Protocol):
    """One way to compute MuSe attention.

    The output is one softmax over a mixed list of terms. Each stage attends to some of the terms and yields a
    `Partial`; merging the partials gives the output `O` and the logsumexp `L`. No gradient flows through the merge:
    with `delta = sum(dO * O) - dL`, the backward of a stage needs only `(dO, L, delta)` and its own inputs.

    The own block goes through the fused operators of the device (`core/local.py`). Everything beyond it is the
    `far_field.py` of the backend. A new kind of term in the softmax is a pair of functions in a stage of each backend,
    and a line in the forward and the backward pass of its far field.
    """

    def find_clusters(
        self, query: Tensor, key: Tensor, config: MuSeConfig, *, is_causal: bool, scale: float
    ) -> Clusters:
        """Cluster the scaled queries and the keys of each head."""

    def choose_blocks(self, query: Tensor, means: Tensor, config: MuSeConfig, *, is_causal: bool) -> Selection:
        """The `retrieved_clusters` blocks outside each query's own (and before it if `is_causal`) whose mean has the
        largest logit, best first; fewer if there are no more `means`.

        `means`: (batch, key heads, blocks, D). A block of `block_size` holds `key_clusters` of these: `retrieved` names
        the former, `opened` the latter inside it. A NaN counts as the largest logit.
        """

    def forward(self, call: Call, chosen: Selection | None) -> Attended:
        """Attend. A `chosen` selection is used as it is."""

    def backward(
        self, call: Call, attended: Attended, grad_out: Tensor, grad_lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value. Clusters and selection are constants."""

    def lse_dtype(self, query: Tensor) -> torch.dtype:
        """The dtype of the lse that `forward` returns."""

    def memory_size(self, call: Call, retrieved: Tensor) -> int:
        """The number of integers in the memory that `forward` returns with this tensor of its selection."""

    def sequences_at_once(self, heads: int) -> int:
        """How many sequences one call serves best, if each has `heads` heads of queries and keys together."""
