"""Multipole Semantic Attention: a training-time approximation of softmax attention for long contexts.

    from muse_attention import muse_attention
    out = muse_attention(query, key, value, is_causal=True)

`attention.py` is that function: it checks the arguments, and resolves the configuration (`config.py`, `defaults.py`)
and the backend of a call. `ops.py` makes forward and backward PyTorch operators. `backends/reference/` defines what
they compute, densely: the method of this library and the paper's. The steps of the first, in order, are in
`backends/torch/blockwise/`:

1. Cluster the keys of each block, and the queries before each generation of blocks:
   `backends/torch/blockwise/find_clusters.py`.
2. Summarise each bucket, a key cluster of a block, by exponentially tilted means for each query cluster that may see
   it: `backends/torch/blockwise/summaries.py`.
3. Attend to the summaries of all visible buckets, and select those whose summaries are expected to be wrong by the
   tolerance or more: `backends/torch/blockwise/columns.py`.
4. Attend exactly to the keys of the selected buckets, a tile of queries at a time, after a search for others that hold
   a key of some weight: `backends/torch/blockwise/retrieval.py`.
5. Merge these terms with the own block (`core/local.py`) into one softmax. `backends/torch/blockwise/far_field.py` runs
   the steps.

The steps of the paper's method are in `backends/torch/`. It clusters the whole sequence, accumulates summaries over
blocks, and retrieves the same number of buckets for every query.

`backends/triton/` has the same for CUDA. `core/` is what backends share: structures, arguments, precision.

`registry.py` finds an attention by its name. `chunked.py` attends to a sequence in chunks, `documents/varlen.py` to
documents in one row of tokens, `distributed/` to sequences over a device mesh. `huggingface/` puts MuSe
into models of transformers, `integrations/` into other trainers. `baselines/` are attentions to compare with, and
`fidelity/` measures their error against exact attention.
Pretraining, evaluation, benchmarks and the `muse` command are another package, `muse_lab`.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muse_attention import baselines as baselines
    from muse_attention import config as config
    from muse_attention import distributed as distributed
    from muse_attention import fidelity as fidelity
    from muse_attention import huggingface as huggingface
    from muse_attention.attention import find_clusters, muse_attention
    from muse_attention.baselines import block_diagonal_attention, exact_attention, moba_attention
    from muse_attention.chunked import ChunkedAttention
    from muse_attention.config import MuSeConfig
    from muse_attention.core.structures import Clusters
    from muse_attention.documents.boundaries import DocumentBoundaries
    from muse_attention.documents.varlen import muse_attn_func, muse_attn_varlen_func
    from muse_attention.registry import Attention, get_attention

__version__ = "0.4.0"

__all__ = [
    "Attention",
    "ChunkedAttention",
    "Clusters",
    "DocumentBoundaries",
    "MuSeConfig",
    "block_diagonal_attention",
    "exact_attention",
    "find_clusters",
    "get_attention",
    "moba_attention",
    "muse_attention",
    "muse_attn_func",
    "muse_attn_varlen_func",
]

_HOMES = {
    "Attention": "registry",
    "ChunkedAttention": "chunked",
    "Clusters": "core.structures",
    "DocumentBoundaries": "documents.boundaries",
    "MuSeConfig": "config",
    "block_diagonal_attention": "baselines",
    "exact_attention": "baselines",
    "find_clusters": "attention",
    "get_attention": "registry",
    "moba_attention": "baselines",
    "muse_attention": "attention",
    "muse_attn_func": "documents.varlen",
    "muse_attn_varlen_func": "documents.varlen",
}
"""The module of each public name. It is imported, and PyTorch with it, when the name is first used."""


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            attribute = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
            globals()[name] = attribute
            return attribute
        if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
