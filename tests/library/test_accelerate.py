"""`attn_implementation="muse"` under Accelerate's sequence parallelism, which is DeepSpeed's Ulysses."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("accelerate", reason="accelerate is not installed: make test-integrations")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make test-integrations")

from muse_attention import huggingface
from tests.models import VOCABULARY, tiny_llama
from tests.trainer_checks import CONFIG, LENGTHS, UPDATES, assert_same_losses, documented_code, on_processes

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def batch(seed: int) -> dict[str, Tensor]:
    """A row of packed documents, none of which predicts the first token of the next."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY // 4, (1, sum(LENGTHS)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def model_with_muse() -> Any:
    huggingface.register(CONFIG)
    torch.manual_seed(0)
    # With larger weights rounding in float32 decides on clusters: after two updates losses differ by 2e-3. In float64,
    # and with exact attention in float32, they agree to 1e-7 there too.
    model = tiny_llama(initializer_range=0.02).float().train()
    model.set_attn_implementation("muse")
    return model


def losses_alone() -> list[float]:
    model = model_with_muse()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for update in range(UPDATES):
        loss = model(**batch(update), use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_updates_over_several_processes_are_those_of_one(ranks: int) -> None:
    on_processes(ranks, _check_updates)


def _check_updates(rank: int) -> None:
    expected = losses_alone()
    assert_same_losses(_losses_together(rank), expected)


def _losses_together(rank: int) -> list[float]:
    """With the two classes by which Accelerate's sequence parallelism works. Accelerate itself refuses it on a CPU."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.comm import torch as backend
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter

    backend.build_shm_op = lambda: None  # it would be compiled, for minutes
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    names: dict[str, Any] = {}
    exec(documented_code("Trainer of transformers, Accelerate and TRL"), names)
    handler, ranks, model = names["handler"], dist.get_world_size(), model_with_muse()
    groups = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        sequence_parallel_size=ranks,
        micro_batch_size=1,
        core_attn_implementation=handler.sp_attn_implementation,
        seq_length=handler.sp_seq_length,
        seq_length_is_variable=handler.sp_seq_length_is_variable,
    )
    rows = [batch(update) for update in range(rank, UPDATES, ranks)]
    parts = UlyssesSPDataLoaderAdapter(
        rows,
        sp_rank=rank,
        sp_group=groups.get_sequence_parallel_group(),
        sp_world_size=ranks,
        device=torch.device("cpu"),
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for part in parts:
        labels = part.pop("shift_labels")
        targets = (labels >= 0).sum()
        dist.all_reduce(targets)
        logits = model(**part, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / targets
        loss.backward()
        loss = loss.detach().clone()
        for tensor in (loss, *(parameter.grad for parameter in model.parameters())):
            dist.all_reduce(tensor)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


def test_its_configuration_refuses_names_that_it_does_not_know() -> None:
    """Why the documented code sets the name afterwards; a release that takes it makes that needless."""
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    with pytest.raises(ValueError, match="Invalid sp_attn_implementation: muse"):
        DeepSpeedSequenceParallelConfig(sp_attn_implementation="muse")
