"""MuSe in torchtitan: overrides of its configuration, loss and gradients of its Llama, and documents in a row."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-integrations")

from torchtitan.config import ConfigManager
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import parallel_dims
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.distributed.utils import get_spmd_context
from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenAttention
from torchtitan.models.gpt_oss import model_registry as gpt_oss_registry
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

from muse_attention.integrations.torchtitan import MuSeAttention, SelectiveACWithMuSe
from muse_attention.ops import FORWARD
from tests.closeness import assert_equal_to_rounding
from tests.trainer_checks import (
    CONFIG,
    LENGTHS,
    Training,
    assert_close_but_not_same,
    assert_same,
    documented,
    on_two_processes,
    sum_of,
    train,
)

MUSE = "muse_attention.integrations.torchtitan.muse"

pytestmark = pytest.mark.filterwarnings("ignore:The .torch. module has already been imported:UserWarning")


def configuration(backend: str = "varlen") -> Any:
    config = copy.deepcopy(model_registry("debugmodel", attn_backend=backend).model)
    config.layers = config.layers[:2]
    return config


def built(config: Any) -> nn.Module:
    torch.manual_seed(0)
    model = config.build()
    model.verify_module_protocol()
    model.init_states()
    return model.double()


def with_muse(config: Any, muse_config: str | None = None) -> Any:
    apply_overrides(OverrideConfig(imports=[(MUSE, {"config": muse_config})]), config)
    return config


def with_exact_attention(config: Any) -> Any:
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def loss_of(tokens: Tensor, lengths: tuple[int, ...] | None = None) -> Callable[[nn.Module], Tensor]:
    """Losses of (batch, length + 1) tokens; positions restart in each document of these lengths."""

    def losses(model: Any) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        positions = torch.cat([torch.arange(length) for length in lengths or (inputs.shape[1],)])
        positions = positions.expand(len(inputs), -1)
        is_exact = isinstance(model.config.first_attention.inner_attention, ScaledDotProductAttention.Config)
        masks = None if is_exact else model.get_attention_masks(positions)
        return nn.functional.cross_entropy(
            model(inputs, positions, masks).flatten(0, 1), targets.flatten(), reduction="none"
        )

    return losses


def random_tokens(batch: int, length: int) -> Tensor:
    return torch.randint(2048, (batch, length + 1), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_short_rows_train_as_with_its_own_attention(backend: str) -> None:
    loss = loss_of(random_tokens(2, 96))
    found = train(built(with_muse(configuration(backend))), loss)
    assert_same(found, train(built(with_exact_attention(configuration())), loss))


def test_longer_rows_are_approximated() -> None:
    loss = loss_of(random_tokens(1, 1024))
    found = train(built(with_muse(configuration(), CONFIG)), loss)
    assert_close_but_not_same(found, train(built(with_exact_attention(configuration())), loss))


def test_documents_train_as_each_alone() -> None:
    model = built(with_muse(configuration(), CONFIG))
    tokens = random_tokens(1, sum(LENGTHS))
    alone, at = [], 0
    for length in LENGTHS:
        alone.append(train(model, loss_of(tokens[:, at : at + length + 1])))
        at += length
    assert_same(train(model, loss_of(tokens, LENGTHS)), sum_of(alone))


def test_the_documented_command() -> None:
    command = documented("torchtitan").replace("\\\n", " ")
    (line,) = re.findall(r"^    torchrun .* -m torchtitan.train (.*)$", command, re.MULTILINE)
    config = ConfigManager().parse_args(line.split())
    assert config.training.disable_cuda_graphs
    apply_overrides(config.override, config)
    assert all(_has_muse(layer) for layer in config.model_spec.model.layers)
    assert isinstance(config.activation_checkpoint, SelectiveACWithMuSe.Config)


def _has_muse(layer: Any) -> bool:
    return isinstance(layer.attention.inner_attention, MuSeAttention.Config)


def test_a_configuration_on_the_command_line() -> None:
    line = [
        "--module",
        "llama3",
        "--config",
        "llama3_debugmodel",
        "--override.imports",
        f'{MUSE}={{"config": "QK32R2"}}',
    ]
    config = ConfigManager().parse_args(line)
    assert len(apply_overrides(config.override, config)) == 6
    for layer in config.model_spec.model.layers:
        assert _has_muse(layer)
        assert layer.attention.inner_attention.config == "QK32R2"


class Calls(TorchDispatchMode):
    """Counts the forward passes of MuSe that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += function is FORWARD
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(("override", "calls"), [(None, 2), ("keep_attention", 1)])
def test_selective_checkpointing_may_keep_the_attention(override: str | None, calls: int, tmp_path: Path) -> None:
    line = ["--module", "llama3", "--config", "llama3_debugmodel", "--override.imports", MUSE]
    if override is not None:
        line.append(MUSE.replace(".muse", f".{override}"))
    config = ConfigManager().parse_args(line)
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    apply_overrides(config.override, config)
    model = built(config.model_spec.model)
    loss = loss_of(random_tokens(1, 64))
    expected = train(model, loss)
    config.activation_checkpoint.build(dump_folder=str(tmp_path)).apply(model)
    with Calls() as counted:
        found = train(model, loss)
    assert_same(Training(found.loss, _without_wrappers(found.gradients)), expected)
    assert counted.number == calls


def _without_wrappers(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_checkpoint_wrapped_module.", ""): gradient for name, gradient in gradients.items()}


def test_sliding_windows_keep_their_own_attention_and_sinks_are_served() -> None:
    config = copy.deepcopy(gpt_oss_registry("debugmodel", attn_backend="varlen").model)
    windows = [layer.attention.inner_attention.window_size for layer in config.layers]
    with_muse(config)
    inner = [layer.attention.inner_attention for layer in config.layers]
    assert {type(attention) for attention in inner} == {VarlenAttention.Config, MuSeAttention.Config}
    assert [isinstance(attention, MuSeAttention.Config) for attention in inner] == [
        window == (-1, 0) for window in windows
    ]
    query, key, value = (torch.randn(1, 40, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    masks = built(configuration()).get_attention_masks(torch.arange(40)[None])
    out = MuSeAttention(MuSeAttention.Config())(
        query, key, value, attention_masks=masks, out_transform=lambda out, lse: out * lse[..., None]
    )
    logits = torch.einsum("bqhd,bkhd->bhqk", query, key.repeat_interleave(2, 2)) / 8**0.5
    logits = logits.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
    exact = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), value.repeat_interleave(2, 2))
    torch.testing.assert_close(out, exact * logits.logsumexp(-1).transpose(1, 2)[..., None])


def test_norms_may_leave_queries_and_keys_in_float32() -> None:
    attention = MuSeAttention(MuSeAttention.Config())
    query, key, value = (torch.randn(1, 40, 2, 8) for _ in range(3))
    masks = built(configuration()).get_attention_masks(torch.arange(40)[None])
    assert attention(query, key, value.bfloat16(), attention_masks=masks).dtype == torch.float32


@pytest.mark.parametrize(
    ("registry", "backend"), [(gpt_oss_registry, "flex"), (model_registry, None)], ids=["windows in masks", "sdpa"]
)
def test_what_has_no_boundaries_is_refused(registry: Callable[..., Any], backend: str | None) -> None:
    config = copy.deepcopy(registry("debugmodel", attn_backend=backend or "varlen").model)
    if backend is None:
        with_exact_attention(config)
    with pytest.raises(ValueError, match="attn_backend='varlen'"):
        with_muse(config)


def test_a_bad_configuration_is_refused_before_the_model_is_built() -> None:
    with pytest.raises(ValueError, match="QK"):
        with_muse(configuration(), "nonsense")


def test_context_parallelism_is_refused() -> None:
    attention = MuSeAttention(MuSeAttention.Config())
    query, key = torch.randn(1, 8, 2, 8), torch.randn(1, 16, 2, 8)
    with pytest.raises(ValueError, match="context_parallel_degree 1"):
        attention(query, key, key, attention_masks=None)


def test_a_compiled_layer_says_what_to_do() -> None:
    model = built(with_muse(configuration()))
    positions = torch.arange(16)[None]
    layer = torch.compile(model.layers["0"], fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="leave 'model' out of --compile"):
        layer(torch.randn(1, 16, 256, dtype=torch.float64), model.get_attention_masks(positions), positions)


def test_its_tensor_parallelism_splits_the_heads() -> None:
    on_two_processes(_check_tensor_parallelism)


def _check_tensor_parallelism(rank: int) -> None:
    """Sharded heads, parameters and tokens against one process, and past torchtitan's checker of such types."""
    parallel_dims.device_type = "cpu"  # torchtitan takes a machine without an accelerator for one with CUDA
    tokens = random_tokens(1, sum(LENGTHS))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    whole = built(with_muse(configuration(), CONFIG))
    expected = whole(inputs, positions, whole.get_attention_masks(positions))
    expected.square().sum().backward()
    config = configuration()
    set_llama3_sharding_config(config, enable_sp=True)
    model = built(with_muse(config, CONFIG))
    masks = model.get_attention_masks(positions)
    dims = parallel_dims.ParallelDims(1, 1, cp=1, tp=2, pp=1, ep=1, world_size=2)
    with get_spmd_context(parallel_dims=dims)():
        model.parallelize(dims)
    annotate_input_spmd_types(dims, inputs, targets, {"positions": positions})
    with get_spmd_context(parallel_dims=dims, spmd_typechecking=True)():
        found = model(inputs, positions, masks)
    with get_spmd_context(parallel_dims=dims)():
        assert_equal_to_rounding(found, expected.chunk(2, -1)[rank], "logits")
        found.square().sum().backward()
    gradients = dict(model.named_parameters())
    for name, parameter in whole.named_parameters():
        if "wqkv" in name:
            own, size = parameter.grad.chunk(2)[rank], parameter.grad.abs().max()
            assert_equal_to_rounding(gradients[name].grad / size, own / size, name)
