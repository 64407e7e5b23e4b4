"""The package as a user meets it: a light import, complete names, and a training step."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import muse_attention

OPTIONAL = {"typer", "rich", "matplotlib", "triton", "transformers"}


def loaded_after(code: str) -> set[str]:
    """Packages in `sys.modules` of a fresh interpreter that has run some code."""
    code = f"import sys\n{code}\nprint(' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    finished = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(finished.stdout.split())


def test_the_import_alone_loads_no_package() -> None:
    assert not loaded_after("import muse_attention") & {*OPTIONAL, "torch", "numpy"}


def test_public_names_need_only_torch_and_numpy() -> None:
    loaded = loaded_after("from muse_attention import muse_attention, get_attention, MuSeConfig, find_clusters")
    assert "torch" in loaded
    assert not loaded & OPTIONAL


def test_submodules_are_attributes_without_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(muse_attention), "fidelity", raising=False)
    assert callable(muse_attention.fidelity.measure)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fidelty'"):
        muse_attention.fidelty  # noqa: B018


def test_a_compiled_function_finds_a_name_that_was_not_used_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(muse_attention), "muse_attention", raising=False)

    @torch.compile(fullgraph=True, backend="eager")
    def attend(x: torch.Tensor) -> torch.Tensor:
        return muse_attention.muse_attention(x, x, x, is_causal=True, config="QK8R1B32")

    assert attend(torch.randn(1, 1, 64, 8)).shape == (1, 1, 64, 8)


def test_every_public_name_exists() -> None:
    for name in muse_attention.__all__:
        assert hasattr(muse_attention, name)
        assert name in dir(muse_attention)


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
