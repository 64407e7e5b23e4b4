"""Blockwise MuSe, the method with a tolerance, in vectorised PyTorch.

It is strictly causal in every bit: matrix products over queries have shapes that depend on the configuration and the
length alone, so that no later token can change the rounding of an earlier row.
"""

from muse_attention.backends.torch.blockwise.far_field import attend, attend_backward
from muse_attention.backends.torch.blockwise.find_clusters import find_clusters

__all__ = ["attend", "attend_backward", "find_clusters"]
