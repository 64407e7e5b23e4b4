"""`exp` in place, by way of `exp2`.

On x86 `torch.exp` is MKL's, which takes a path 10 to 40 times slower for every result that underflows. Attention
weights underflow all the time, and masked ones always do. `exp2` has no such path.
"""

from __future__ import annotations

import math

from torch import Tensor


def exp_(exponents: Tensor) -> Tensor:
    return exponents.mul_(math.log2(math.e)).exp2_()
