"""`ChunkedAttention`: a sequence in chunks is the sequence."""

from __future__ import annotations

import pytest
import torch

from muse_attention import ChunkedAttention, MuSeConfig, muse_attention
from tests.chunks import Split


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_chunks_give_what_one_call_gives(first: int) -> None:
    for seed in range(first, first + 25):
        Split.draw(seed).check(backend="torch")


@pytest.mark.parametrize("seed", range(100, 108))
def test_chunks_give_what_one_call_gives_by_definition(seed: int) -> None:
    Split.draw(seed, longest=60).check(backend="reference")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, kernels are compiled: test_cuda.py")
@pytest.mark.parametrize(
    ("config", "cuts"), [("Q2K3T0.05B16", [16, 32]), ("Q2K3T0.05B16,tile=4", [20]), ("Q2K3T0.1B16", [3, 40])]
)
def test_kernels_give_chunks_what_one_call_gives(config: str, cuts: list[int]) -> None:
    pytest.importorskip("triton")
    Split(config, heads=1, key_heads=1, length=41, cuts=cuts, seed=1).check(backend="triton")


def test_a_whole_block_is_not_computed_again() -> None:
    """Where its queries are overwritten with what is not a number, nothing notices."""
    tensors = [torch.randn(1, 1, 128, 8) for _ in range(3)]
    expected = muse_attention(*tensors, is_causal=True, config="Q2K4T0.1B32", backend="torch")[:, :, 96:]
    attention = ChunkedAttention("Q2K4T0.1B32", backend="torch")
    attention(*(tensor[:, :, :96] for tensor in tensors))
    assert attention._rows is not None
    attention._rows[0][:, :, 64:] = torch.nan  # (The centroids that serve the fourth block come from the first two.)
    torch.testing.assert_close(attention(*(tensor[:, :, 96:] for tensor in tensors)), expected)


def test_keys_of_earlier_chunks_have_gradients() -> None:
    chunks = [[torch.randn(1, 1, 40, 8, requires_grad=True) for _ in range(3)] for _ in range(2)]
    attention = ChunkedAttention("Q2K4T0.1B16")
    outs = [attention(*chunk) for chunk in chunks]
    outs[1].sum().backward()
    query, key, value = (tensor.grad for tensor in chunks[0])
    assert query is None
    for gradient in (key, value):
        assert gradient is not None
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "depends on the length"),
        ("Q8K32T0.1", "depends on the length"),
        ("paper", "depends on the length"),
        ("QK4R1B16", "the paper's method"),
        (MuSeConfig.paper(1024), "the paper's method"),
        (3, "must be a MuSeConfig"),
    ],
)
def test_configurations_that_cannot_be_chunked(config: object, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        ChunkedAttention(config)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda query, key, value: (query[:, :1], key[:, :1], value[:, :1]), "query has shape"),
        (lambda query, key, value: (query.double(), key.double(), value.double()), "query has dtype"),
        (lambda query, key, value: (query, key[:, :1], value[:, :1]), "key has shape"),
        (lambda query, key, value: (query, key, value[..., :4]), "value has shape"),
        (lambda query, key, value: (query, key[:, :, 1:], value), "key has length"),
    ],
)
def test_chunks_that_do_not_continue_the_sequence(change: object, says: str) -> None:
    chunk = [torch.randn(1, 2, 20, 8) for _ in range(3)]
    attention = ChunkedAttention("Q2K4T0.1B16")
    attention(*chunk)
    with pytest.raises(ValueError, match=says) as error:
        attention(*change(*chunk))  # type: ignore[operator]
    assert "\n" not in str(error.value)
    assert attention.length == 20
