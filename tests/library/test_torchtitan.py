"""MuSe in torchtitan: overrides of its configuration, loss and gradients of its Llama, documents, and many ranks."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-integrations")

from torchtitan.config import CompileConfig, ConfigManager
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import parallel_dims
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.context_parallel import prepare_context_parallel_input
from torchtitan.distributed.full_dtensor import validate_config
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenAttention
from torchtitan.models.gpt_oss import model_registry as gpt_oss_registry
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

from muse_attention.documents.operator import FORWARD as PACKED_FORWARD
from muse_attention.integrations.torchtitan import MuSeAttention, MuSeUlyssesAttention, SelectiveACWithMuSe
from muse_attention.ops import FORWARD
from tests.closeness import assert_equal_to_rounding
from tests.trainer_checks import (
    CONFIG,
    LENGTHS,
    UPDATES,
    Training,
    assert_close_but_not_same,
    assert_same,
    assert_same_losses,
    documented,
    on_processes,
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


def compiled(config: Any) -> nn.Module:
    """As torchtitan compiles: each layer as one graph, which may not break. Inductor would take minutes on a CPU."""
    model = built(config)
    dims = parallel_dims.ParallelDims(1, 1, cp=1, tp=1, pp=1, ep=1, world_size=1)
    apply_compile(model, compile_config=CompileConfig(enable=True, backend="aot_eager"), parallel_dims=dims)
    return model


as_torchtitan_sets_it = torch._dynamo.config.patch(
    capture_scalar_outputs=True, skip_fwd_side_effects_in_bwd_under_checkpoint=True
)


@as_torchtitan_sets_it
def test_compiled_layers_serve_all_documents_with_one_graph() -> None:
    tokens = random_tokens(1, 256)
    eager, model = built(with_muse(configuration(), "QK4R1B32")), compiled(with_muse(configuration(), "QK4R1B32"))
    for lengths in ((200, 56), (90, 60, 106)):  # these show the compiler which sizes change
        train(model, loss_of(tokens, lengths))
    for lengths in ((40, 1, 100, 80, 35), (128, 128), (100, 100, 56)):
        loss = loss_of(tokens, lengths)
        with torch.compiler.set_stance("fail_on_recompile"):
            found = train(model, loss)
        assert_same(found, train(eager, loss))


@as_torchtitan_sets_it
def test_compiled_layers_may_keep_the_attention(tmp_path: Path) -> None:
    """With selective checkpointing, torchtitan's default."""
    assert PACKED_FORWARD in SelectiveACWithMuSe.Config().build(dump_folder=str(tmp_path)).get_save_ops()
    config = with_muse(configuration(), CONFIG)
    config.layers = config.layers[:1]
    loss = loss_of(random_tokens(1, sum(LENGTHS)), LENGTHS)
    expected = train(built(config), loss)
    model = built(config)
    SelectiveACWithMuSe.Config().build(dump_folder=str(tmp_path)).apply(model)
    for layer in model.layers.values():
        layer.compile(fullgraph=True, backend="aot_eager")
    found = train(model, loss)
    assert_same(Training(found.loss, _without_wrappers(found.gradients)), expected)


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


ULYSSES = f"{MUSE}_ulysses"


def context_parallel(ranks: int, *, double: bool = False) -> tuple[Any, Any]:
    """The model of a command line, and torchtitan's mesh, as its trainer makes them.

    FSDP is left out: of PyTorch 2.13, it does not take what torchtitan annotates.
    """
    parallel_dims.device_type = "cpu"
    line = ["--module", "llama3", "--config", "llama3_debugmodel", "--training.seq_len", str(sum(LENGTHS))]
    line += ["--parallelism.context_parallel_degree", str(ranks)]
    line += ["--override.imports", f'{ULYSSES}={{"config": "{CONFIG}"}}']
    config = ConfigManager().parse_args(line)
    model_config = config.model_spec.model
    model_config.layers = model_config.layers[:2]
    model_config.update_from_config(config=config)
    apply_overrides(config.override, config)
    set_spmd_backend(config.parallelism.spmd_backend)
    dims = parallel_dims.ParallelDims.from_config(config.parallelism, ranks)
    torch.manual_seed(0)
    model = model_config.build()
    model.init_states()
    model = model.double() if double else model
    if ranks > 1:
        with get_spmd_context(parallel_dims=dims)():
            validate_config(dims, model)
            model.parallelize(dims)
    return model, dims


def packed_batch(seed: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Tokens, their targets, and positions that restart in each document."""
    tokens = torch.randint(64, (1, sum(LENGTHS) + 1), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), {"positions": positions}


def own_part(dims: Any, batch: tuple[Tensor, Tensor, dict[str, Any]], balancer: str | None = None) -> Any:
    """By the functions that torchtitan's trainer calls."""
    mesh = dims.get_mesh("cp")
    inputs, labels, others = prepare_context_parallel_input(*batch, mesh, torch.device("cpu"), balancer)
    return annotate_input_spmd_types(dims, inputs, labels, others)


def test_its_context_parallelism() -> None:
    on_two_processes(_check_context_parallelism)


def _check_context_parallelism(rank: int) -> None:
    """Documents in two parts of a row against the whole row, and past torchtitan's checker of types."""
    whole, _ = context_parallel(1, double=True)
    inputs, _, others = packed_batch(1)
    expected = whole(inputs, **others)
    expected.square().sum().backward()
    model, dims = context_parallel(2, double=True)
    context = get_spmd_context(parallel_dims=dims)
    inputs, _, others = own_part(dims, packed_batch(1))
    with get_spmd_context(parallel_dims=dims, spmd_typechecking=True)():
        found = model(inputs, **others)
    with context():
        assert_equal_to_rounding(found, expected.chunk(2, 1)[rank], "logits")
        found.square().sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.distributed.all_reduce(parameter.grad)
        size = other.grad.abs().max()
        assert_equal_to_rounding(parameter.grad / size, other.grad / size, name)
    inputs, _, others = own_part(dims, packed_batch(1), "headtail")
    with context(), pytest.raises(ValueError, match="context_parallel_load_balancer None"):
        model(inputs, **others)
    layer = model.layers["0"].attention
    with context(), pytest.raises(Exception, match="leave 'model' out of --compile"):
        torch.compile(layer, backend="eager", fullgraph=True)(
            torch.randn(1, 8, 256).double(), None, torch.arange(8)[None]
        )


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_updates_with_context_parallelism_are_those_of_one_process(ranks: int) -> None:
    on_processes(ranks, _check_updates)


def _check_updates(rank: int) -> None:
    ranks = torch.distributed.get_world_size()
    assert_same_losses(_losses(ranks), _losses(1))


def _losses(ranks: int) -> list[float]:
    model, dims = context_parallel(ranks)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for update in range(UPDATES):
        batch = packed_batch(update)
        tokens = batch[1].numel()
        inputs, labels, others = batch if ranks == 1 else own_part(dims, batch)
        with nullcontext() if ranks == 1 else get_spmd_context(parallel_dims=dims)():
            logits = model(inputs, **others)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens
            loss.backward()
        loss = loss.detach().clone()
        if ranks > 1:
            for tensor in (loss, *(parameter.grad for parameter in model.parameters())):
                torch.distributed.all_reduce(tensor)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


def test_context_parallelism_needs_its_override() -> None:
    dims = SimpleNamespace(cp_enabled=True, spmd_backend="spmd_types")
    with pytest.raises(ValueError, match="muse_ulysses"):
        MuSeAttention(MuSeAttention.Config()).parallelize(dims)
    dims.spmd_backend = "full_dtensor"
    with pytest.raises(ValueError, match="spmd_backend spmd_types"):
        MuSeUlyssesAttention(MuSeUlyssesAttention.Config()).parallelize(dims)
    config = copy.deepcopy(gpt_oss_registry("debugmodel", attn_backend="varlen").model)
    with pytest.raises(ValueError, match="sliding window has no context parallelism"):
        apply_overrides(OverrideConfig(imports=[ULYSSES]), config)


def test_the_documented_command_with_context_parallelism() -> None:
    command = documented("torchtitan").replace("\\\n", " ")
    (options,) = re.findall(r"^    (--parallelism.context_parallel_degree .*)$", command, re.MULTILINE)
    config = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_8b", *options.split()])
    assert config.parallelism.context_parallel_load_balancer is None
    assert config.parallelism.context_parallel_degree > 1
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    config.model_spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    (layer,) = config.model_spec.model.layers
    assert isinstance(layer.attention.inner_attention, MuSeUlyssesAttention.Config)
    assert isinstance(config.activation_checkpoint, SelectiveACWithMuSe.Config)
