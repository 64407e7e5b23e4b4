"""The package as a user meets it: a light import, complete names, and a training step."""

from __future__ import annotations

import subprocess
import sys

import torch

import muse_attention


def test_import_needs_only_torch_and_numpy() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import muse_attention; "
        "found = {'typer', 'rich', 'matplotlib', 'triton', 'transformers'} & (set(sys.modules) - before); "
        "sys.exit(f'imported {found}' if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_exists() -> None:
    for name in muse_attention.__all__:
        assert hasattr(muse_attention, name)


def test_drop_in_for_sdpa_in_a_training_step() -> None:
    """A tiny layer learns through MuSe attention: the loss falls, and exact attention agrees at the end."""
    torch.manual_seed(0)
    projection = torch.nn.Linear(16, 48)
    optimizer = torch.optim.Adam(projection.parameters(), lr=1e-2)
    tokens, target = torch.randn(2, 200, 16), torch.randn(2, 200, 16).cumsum(1) / 20

    def forward(attention: muse_attention.Attention) -> torch.Tensor:
        query, key, value = projection(tokens).view(2, 200, 3, 2, 8).permute(2, 0, 3, 1, 4)
        out = attention(query, key, value, is_causal=True)
        return (out.transpose(1, 2).flatten(2) - target).square().mean()

    muse = muse_attention.get_attention("muse:QK8R1B32")
    first = float(forward(muse).detach())
    for _ in range(30):
        optimizer.zero_grad()
        loss = forward(muse)
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.9 * first
    with torch.no_grad():
        assert abs(float(forward(muse_attention.exact_attention)) - float(loss.detach())) < 0.05 * first
