"""Pretraining on a GPU: what goes through other operators there than on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import cross_entropy

from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.model.chunked_loss import IGNORED, chunked_cross_entropy
from muse_lab.pretraining.model.configuration import DecoderConfig
from muse_lab.pretraining.model.decoder import DecoderForCausalLM
from muse_lab.pretraining.model.sliding_window import sliding_window_attention
from muse_lab.pretraining.parallel import World
from muse_lab.pretraining.recipes import override
from muse_lab.pretraining.training import train
from tests.closeness import assert_as_accurate_as_pytorch
from tests.lab.test_sliding_window import dense, inputs
from tests.training_runs import SMALL, assert_same_run, losses, train_until

pytestmark = pytest.mark.gpu
HALVES = (torch.bfloat16, torch.float16)


def with_gradients(out: Tensor, weights: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return [out, *torch.autograd.grad((out * weights.to(out)).sum(), tensors)]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("length", "window", "head_dim"), [(1000, 256, 64), (300, 7, 64), (100, 256, 128)])
def test_sliding_window(length: int, window: int, head_dim: int, dtype: torch.dtype) -> None:
    tensors = inputs(length, head_dim=head_dim)
    halves = [tensor.detach().to("cuda", dtype).requires_grad_() for tensor in tensors]
    weights = torch.randn(2, 2, length, head_dim)
    exact = with_gradients(dense(*tensors, window), weights, tensors)
    found = with_gradients(sliding_window_attention(*halves, window=window), weights.cuda(), halves)
    on_cpu = [tensor.detach().cpu().requires_grad_() for tensor in halves]
    theirs = with_gradients(dense(*on_cpu, window), weights, on_cpu)
    for one, other, truth in zip(found, theirs, exact, strict=True):
        assert_as_accurate_as_pytorch(one.cpu(), other, truth)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_chunked_loss(dtype: torch.dtype) -> None:
    rows, width, vocabulary = 300, 64, 5000
    hidden, weight = (torch.randn(count, width, dtype=torch.float64).requires_grad_() for count in (rows, vocabulary))
    targets = torch.randint(vocabulary, (rows,))
    targets[::7] = IGNORED

    def loss_and_gradients(convert: Any, function: Any) -> list[Tensor]:
        tensors = [convert(tensor.detach()).requires_grad_() for tensor in (hidden, weight)]
        loss = function(*tensors, targets.to(tensors[0].device))
        return [loss.cpu(), *(gradient.cpu() for gradient in torch.autograd.grad(loss, tensors))]

    def plain(states: Tensor, output: Tensor, wanted: Tensor) -> Tensor:
        logits = states @ output.mT
        return cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), wanted)

    exact = loss_and_gradients(lambda tensor: tensor, plain)
    theirs = loss_and_gradients(lambda tensor: tensor.to("cuda", dtype), plain)
    found = loss_and_gradients(
        lambda tensor: tensor.to("cuda", dtype), lambda *args: chunked_cross_entropy(*args, chunk_size=128)
    )
    for one, other, truth in zip(found, theirs, exact, strict=True):
        assert_as_accurate_as_pytorch(one, other, truth)


def test_layers_compile_into_one_graph_each() -> None:
    model = DecoderForCausalLM(DecoderConfig.tiny(num_hidden_layers=6, attention="muse:QK8R1B64")).cuda().train()
    ids = torch.randint(4096, (2, 600), device="cuda")
    torch.compiler.reset()
    counter = CompileCounterWithBackend("inductor")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=counter)
    for attention in ("muse:QK8R1B64", "exact", "moba:L64B16R1"):
        model.set_attention(attention)
        with torch.autocast("cuda", torch.bfloat16):
            model(ids, labels=ids, use_cache=False).loss.backward()
    assert counter.frame_count == 4  # with a window, and without one for each attention


@pytest.mark.parametrize("changes", [["precision=bfloat16"], ["precision=bfloat16", "compile=true", "recompute=true"]])
def test_a_run_goes_on_bit_for_bit(corpus: Corpus, tmp_path: Path, changes: list[str]) -> None:
    """With `deterministic`, which the recipe tiny has."""
    recipe, world = override(SMALL, changes), World(torch.device("cuda"))
    train(corpus, recipe, tmp_path / "whole", world=world)
    train_until(5, corpus, recipe, tmp_path / "stopped", world=world)
    train(corpus, recipe, tmp_path / "stopped", world=world)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0] - 1
