"""With which backends of `torch.compile` an attention is compiled in tests."""

from __future__ import annotations

import shutil
from collections.abc import Sequence


def compiled_with(attentions: Sequence[str]) -> list[tuple[str, str]]:
    """Each with `aot_eager`, and the first with `inductor` too, which takes seconds, where there is a C++ compiler."""
    inductor = [(attentions[0], "inductor")] if shutil.which("g++") else []
    return [*((name, "aot_eager") for name in attentions), *inductor]
