"""Multipole Semantic Attention: a training-time approximation of softmax attention for long contexts.

    from muse_attention import muse_attention
    out = muse_attention(query, key, value, is_causal=True)

The algorithm, in order, and where to read each step:

0. `config.py`: all choices in one value. `defaults.py`: the default for a length. `structures.py`: what passes between
   the steps.
1. Cluster queries and keys, separately, over the whole sequence; assign inside each block: `stages/clustering.py`.
2. Summarise each (query cluster, key cluster, block) by exponentially tilted means, and
3. accumulate the summaries over the blocks a query sees: `stages/summaries.py`.
4. Select the clusters to open and the blocks to retrieve; attend to the summaries of the rest: `stages/selection.py`,
   or by a tolerance, `stages/error_control.py`.
5. Attend exactly to the retrieved buckets, `stages/retrieval.py`, and to the own block, `local.py`.
6. Merge everything as one softmax: `stages/merging.py`.

`kernels/` has the same files as `stages/`, in Triton for CUDA; `far_field.py` of each runs its steps in order.
`reference.py` is the whole algorithm in one dense file, the definition. `pipeline.py` is forward and backward with
either backend; `operator.py` makes it an operator of PyTorch; `attention.py` is the function users call, and
`packed.py` the same for documents in one row of tokens. `distributed` attends to sequences over a device mesh.

`huggingface.py` runs models of transformers with MuSe, `pretrained.py` loads them, `capture.py` captures the queries,
keys and values of their layers, and `evaluation` measures them. `pretraining` has data, the paper's decoder and a
trainer, and `integrations` puts MuSe into the trainers of others.
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
    from muse_attention.config import MuSeConfig
    from muse_attention.core.structures import Clusters
    from muse_attention.documents.boundaries import DocumentBoundaries
    from muse_attention.documents.varlen import muse_attn_func, muse_attn_varlen_func
    from muse_attention.registry import Attention, get_attention

__version__ = "0.3.0.dev0"

__all__ = [
    "Attention",
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
"""The module of each public name: imported when the name is used first, and PyTorch with it."""


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
            globals()[name] = found
            return found
        if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
