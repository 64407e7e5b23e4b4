"""How far an attention is from exact attention: the error of outputs and gradients, what was retrieved, and lookups.

It measures given tensors; `muse_lab.evaluation` measures whole models with it.
"""

from __future__ import annotations

from muse_attention.fidelity.error import Fidelity, compare, future_influence, measure, position_error

__all__ = ["Fidelity", "compare", "future_influence", "measure", "position_error"]
