"""Checkpoints as they were written before manifests said where each part of a tensor is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor


def write_old(folder: Path, step: int, about: dict[str, Any], shards: Sequence[Mapping[str, Tensor]]) -> Path:
    """Format 1, with the shards of several ranks along the first dimension."""
    path = folder / f"step-{step:08}"
    path.mkdir(parents=True)
    files = []
    for rank, tensors in enumerate(shards):
        content = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        name = f"rank-{rank:05}-00000.safetensors"
        (path / name).write_bytes(content)
        files.append({"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    document = {"format": 1, "step": step, "about": about, "files": files}
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**document, "sha256": digest}, indent=2) + "\n")
    return path
