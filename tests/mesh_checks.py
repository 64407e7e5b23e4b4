"""Checks of `muse_attention.distributed` that several processes run together, each against the whole in itself.

`run` is one rank: it starts the process group once, runs all checks for that number of ranks, and reports what failed.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from examples.ring import ring_attention
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from muse_attention import DocumentBoundaries, get_attention, muse_attn_varlen_func
from muse_attention.core.recording import recorded_calls
from muse_attention.distributed import heads_to_sequence, sequence_to_heads, ulysses, ulysses_bytes
from muse_attention.distributed.all_to_all import from_rank_before
from muse_attention.huggingface import use_attention
from muse_attention.integrations.rows import attend_to_rows
from tests.closeness import assert_equal_to_rounding
from tests.markdown_pages import ROOT
from tests.models import tiny_llama, token_ids
from tests.processes import send_reports
from tests.refusals import one_line_error

LENGTH = 64
MUSE = "muse:Q3K4R2B16"


def whole_tensors(heads: int = 8, key_heads: int = 2, batch: int = 2, length: int = LENGTH) -> list[Tensor]:
    """Queries, keys and values of whole sequences, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((heads, 8), (key_heads, 8), (key_heads, 6))
    return [
        torch.randn(batch, number, length, dim, generator=generator, dtype=torch.float64).requires_grad_()
        for number, dim in shapes
    ]


def shard(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    return tensor.chunk(mesh.size(), 2)[mesh.get_local_rank()]


def shards(tensors: list[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    return [shard(tensor.detach(), mesh).clone().requires_grad_() for tensor in tensors]


def gradients(results: tuple[Tensor, ...], weights: list[Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(
        sum((part * weight).sum() for part, weight in zip(results, weights, strict=True)), inputs
    )


def assert_same_as_one_process(
    mesh: DeviceMesh, whole: list[Tensor], expected: tuple[Tensor, ...], attend: Callable[..., tuple[Tensor, ...]]
) -> None:
    """Outputs and gradients of a function of this rank's parts, against those of whole sequences."""
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(part.shape, generator=generator, dtype=part.dtype) for part in expected]
    parts = shards(whole, mesh)
    found = attend(*parts)
    for ours, theirs in zip(found, expected, strict=True):
        assert_equal_to_rounding(ours, shard(theirs, mesh), "output")
    own = gradients(found, [shard(weight, mesh) for weight in weights], parts)
    for name, ours, theirs in zip(("query", "key", "value"), own, gradients(expected, weights, whole), strict=True):
        assert_equal_to_rounding(ours, shard(theirs, mesh), f"gradient of {name}")


def check_attention(mesh: DeviceMesh, name: str, *, is_causal: bool = True, **shape: int) -> None:
    whole = whole_tensors(**shape)
    settings: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": True, "return_lse": True}
    with recorded_calls() as of_one:
        expected = get_attention(name)(*whole, **settings)
    with recorded_calls() as of_many:
        assert_same_as_one_process(mesh, whole, expected, lambda *parts: ulysses(name, *parts, mesh, **settings))
    ((one,), (many,)) = of_one, of_many
    for found, selected in zip(vars(many.selection).values(), vars(one.selection).values(), strict=True):
        assert torch.equal(found, selected.chunk(mesh.size(), 1)[mesh.get_local_rank()])
    assert torch.equal(
        many.clusters.query_assignment,
        one.clusters.query_assignment.chunk(mesh.size(), 1)[mesh.get_local_rank()],
    )


def exact(mesh: DeviceMesh) -> None:
    check_attention(mesh, "exact")


def muse(mesh: DeviceMesh) -> None:
    check_attention(mesh, MUSE)


def muse_that_sees_all(mesh: DeviceMesh) -> None:
    check_attention(mesh, MUSE, is_causal=False, heads=4, key_heads=4, batch=1)


def groups_that_ranks_cut(mesh: DeviceMesh) -> None:
    """On four ranks, three query heads each, of two key heads."""
    check_attention(mesh, MUSE, heads=12, key_heads=6)


def packed_documents(mesh: DeviceMesh) -> None:
    boundaries = DocumentBoundaries.from_lengths([21, 3, 40])

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        ends, longest = boundaries, boundaries.longest
        out = muse_attn_varlen_func(*rows, ends, ends, longest, longest, causal=True, config="Q3K4R2B16")
        return out.transpose(0, 1)[None]

    whole = whole_tensors(batch=1)
    assert_same_as_one_process(mesh, whole, (attend(*whole),), lambda *parts: (ulysses(attend, *parts, mesh),))


def rows_of_trainers(mesh: DeviceMesh) -> None:
    """Documents in two rows, in the layout of trainers."""

    def attend(*tensors: Tensor, mesh: DeviceMesh | None = None) -> tuple[Tensor, Tensor]:
        rows, ends = (tensor.transpose(1, 2) for tensor in tensors), [0, 21, 64, 104, 128]
        out, lse = attend_to_rows(*rows, ends, "Q3K4R2B16", is_causal=True, scale=None, mesh=mesh)
        return out.transpose(1, 2), lse

    whole = whole_tensors()
    assert_same_as_one_process(mesh, whole, attend(*whole), functools.partial(attend, mesh=mesh))


def reused_buffers(mesh: DeviceMesh) -> None:
    """Boundaries and positions come from the first rank, into the same memory for every batch."""
    ends, positions = torch.zeros(3, dtype=torch.int32), torch.zeros(1, LENGTH, dtype=torch.long)
    rows = [tensor.detach()[0].transpose(0, 1) for tensor in whole_tensors(batch=1)]
    model, ids = tiny_llama(), token_ids(LENGTH)
    settings: dict[str, Any] = {"causal": True, "config": "Q3K4R2B16"}
    for lengths in ([40, 24], [17, 47]):
        told = torch.cat([torch.arange(length) for length in lengths])[None]
        if mesh.get_local_rank() == 0:
            ends.copy_(torch.tensor([0, lengths[0], LENGTH]))
            positions.copy_(told)
        for buffer in (ends, positions):
            dist.broadcast(buffer, 0, group=mesh.get_group())
        found = muse_attn_varlen_func(*rows, ends, ends, LENGTH, LENGTH, **settings)
        boundaries = DocumentBoundaries.from_lengths(lengths)
        expected = muse_attn_varlen_func(*rows, boundaries, boundaries, LENGTH, LENGTH, **settings)
        assert torch.equal(found, expected)
        with use_attention(model, MUSE), torch.no_grad():
            found, expected = (model(ids, position_ids=given).logits for given in (positions, told))
        assert torch.equal(found, expected)


def there_and_back(mesh: DeviceMesh) -> None:
    (query, *_) = whole_tensors()
    part = shard(query.detach(), mesh)
    heads = sequence_to_heads(part, mesh)
    assert torch.equal(heads, query.chunk(mesh.size(), 1)[mesh.get_local_rank()])
    assert torch.equal(heads_to_sequence(heads, mesh), part)


def rank_before(mesh: DeviceMesh) -> None:
    """In a ring; a gradient goes to the rank that the tensor came from. Compiled, too."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for call in (from_rank_before, torch.compile(from_rank_before, fullgraph=True, backend="aot_eager")):
        tensor = torch.full((2, 3), float(rank)).requires_grad_()
        received = call(tensor, mesh)
        assert torch.equal(received, torch.full((2, 3), float((rank - 1) % ranks)))
        (received * (rank + 1)).sum().backward()
        assert torch.equal(tensor.grad, torch.full((2, 3), float((rank + 1) % ranks + 1)))


def bytes_moved(mesh: DeviceMesh) -> None:
    """What is sent to other ranks, forward and backward, is what the formula says."""
    sent = []
    exchange = collectives.all_to_all_single

    def counted(tensor: Tensor, *arguments: Any) -> Tensor:
        sent.append(tensor.numel() * tensor.element_size() * (mesh.size() - 1) // mesh.size())
        return exchange(tensor, *arguments)

    parts = shards(whole_tensors(), mesh)
    expected = ulysses_bytes(
        length=LENGTH, heads=8, key_heads=2, head_dim=8, value_dim=6, batch=2, ranks=mesh.size(), element_size=8
    )
    with mock.patch.object(collectives, "all_to_all_single", counted):
        out = ulysses("exact", *parts, mesh, enable_gqa=True)
        assert sum(sent) == expected
        out.sum().backward()
        assert sum(sent) == 2 * expected


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made in this context held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # (The latter only wraps a tensor, and has no memory of its own.)
            if isinstance(leaf, Tensor) and not isinstance(leaf, collectives.AsyncCollectiveTensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in old | self.seen:
                    self.add(storage)
        return result

    def add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        self.seen.add(address)
        self.live += size
        self.most = max(self.most, self.live)

        def free() -> None:
            self.seen.discard(address)
            self.live -= size

        weakref.finalize(storage, free)


def most_bytes(attend: Callable[..., Tensor], inputs: list[Tensor], gradient: Tensor) -> list[int]:
    """At one time, beyond the inputs: in a forward pass, and in a forward and backward pass."""
    with LiveBytes() as forward:
        out = attend(*inputs)
    del out
    with LiveBytes() as both:
        torch.autograd.grad(attend(*inputs), inputs, gradient)
    return [forward.most, both.most]


def _exact_over(mesh: DeviceMesh, *inputs: Tensor) -> Tensor:
    out: Tensor = ulysses("exact", *inputs, mesh)
    return out


def memory(mesh: DeviceMesh) -> None:
    """Beside whole sequences of its heads and what attention to them needs, at most two tensors of their size.

    A thread of the exchange may hold a buffer for a moment longer: the least of several runs counts.
    """
    query, key, _ = whole_tensors(heads=8, key_heads=8)
    parts = shards([query, key, key], mesh)
    activation = parts[0].numel() * parts[0].element_size()
    heads = [sequence_to_heads(part.detach(), mesh).requires_grad_() for part in parts]
    attend = get_attention("exact")
    alone = most_bytes(attend, heads, torch.ones_like(heads[0]))
    attend_together = functools.partial(_exact_over, mesh)
    runs = [most_bytes(attend_together, parts, torch.ones_like(parts[0])) for _ in range(6)]
    for ours, of_attention in zip(map(min, zip(*runs, strict=True)), alone, strict=True):
        assert activation <= of_attention
        assert ours <= len(heads) * activation + of_attention + 2 * activation


def compiled(mesh: DeviceMesh) -> None:
    def attend(*parts: Tensor) -> tuple[Tensor, ...]:
        return ulysses(MUSE, *parts, mesh, is_causal=True, enable_gqa=True, return_lse=True)

    whole = whole_tensors()
    expected = get_attention(MUSE)(*whole, is_causal=True, enable_gqa=True, return_lse=True)
    together = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert_same_as_one_process(mesh, whole, expected, together)


def one_rank_copies_nothing(mesh: DeviceMesh) -> None:
    parts = shards(whole_tensors(), mesh)
    given: list[Tensor] = []
    result = object()

    def attend(*tensors: Tensor, scale: float) -> object:
        assert scale == 0.5
        given.extend(tensors)
        return result

    assert ulysses(attend, *parts, mesh, scale=0.5) is result
    assert all(found is part for found, part in zip(given, parts, strict=True))
    assert sequence_to_heads(parts[0], mesh) is parts[0]
    assert heads_to_sequence(parts[0], mesh) is parts[0]


def refusals(mesh: DeviceMesh) -> None:
    def heads(number: int, key_heads: int = 1) -> list[Tensor]:
        return [torch.zeros(1, count, 4, 8) for count in (number, key_heads, key_heads)]

    query, key, value = heads(4)
    with refused("query has 6 heads, not divisible by the 4 ranks of the mesh; choose their number from 1, 2, 3, 6"):
        ulysses("exact", *heads(6), mesh)
    with refused("tensor has 2 heads, not divisible by the 4 ranks of the mesh; choose their number from 1, 2"):
        sequence_to_heads(torch.zeros(1, 2, 4, 8), mesh)
    with refused("query has 4 heads, not a multiple of the 3 heads of key"):
        ulysses("exact", *heads(4, 3), mesh)
    with refused("the 4 ranks of the mesh do not divide the length 6; pad the sequences"):
        heads_to_sequence(torch.zeros(1, 2, 6, 8), mesh)
    with refused("key has length 2, query 4"):
        ulysses("exact", query, key[:, :, :2], value, mesh)
    with refused("query has shape (4, 4, 8)"):
        ulysses("exact", query[0], key, value, mesh)
    with refused("mesh has 2 dimensions; pass one of them, as mesh['sequence']"):
        ulysses("exact", query, key, value, init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence")))
    with refused("mesh is a int; make one with"):
        ulysses("exact", query, key, value, 4)  # type: ignore[arg-type]


def ranks_that_disagree(mesh: DeviceMesh) -> None:
    """All ranks say which one differs, until they agree in a call; later calls compare nothing."""
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    odd = mesh.size() - 1

    def attend(heads: int = 4, length: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
        return ulysses("exact", *(torch.zeros(1, heads, length, 8, dtype=dtype) for _ in range(3)), mesh)

    changes: list[tuple[dict[str, Any], str]] = [
        ({"length": 4}, "float32 (1, 4, 4, 8)"),
        ({"heads": 8}, "float32 (1, 8, 6, 8)"),
        ({"dtype": torch.bfloat16}, "bfloat16 (1, 4, 6, 8)"),
    ]
    for change, found in changes:
        held, usual = (f"query {part}, key {part}, value {part}" for part in (found, "float32 (1, 4, 6, 8)"))
        with refused(f"rank {odd} holds {held}; rank 0 holds {usual}: all ranks of the mesh must hold equal shapes"):
            attend(**change if mesh.get_local_rank() == odd else {})
    with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as compared:
        attend()
        attend(length=8)
    assert compared.call_count == 1


@contextmanager
def refused(message: str) -> Iterator[None]:
    with one_line_error(re.escape(message)):
        yield


def of_a_mesh_with_two_dimensions(mesh: DeviceMesh) -> None:
    """Two meshes of two ranks each, side by side."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    check_attention(both["sequence"], MUSE)
    check_attention(both["data"], "exact")


def ring(mesh: DeviceMesh) -> None:
    whole = whole_tensors(heads=2, key_heads=2)
    whole[2] = whole[1].detach().flip(2).requires_grad_()
    for name in ("exact", "muse:QK4R4SP8B8"):  # the second retrieves everything
        expected = get_attention("exact")(*whole, is_causal=True)
        assert_same_as_one_process(mesh, whole, (expected,), lambda *parts, name=name: (ring_attention(name, *parts),))


def documentation(mesh: DeviceMesh) -> None:
    """The code of docs/distributed.md runs, on a smaller mesh of CPUs."""
    page = (ROOT / "docs" / "distributed.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    query, key, value = (tensor.detach().chunk(2, 2)[mesh.get_local_rank() % 2] for tensor in whole_tensors(batch=1))
    names: dict[str, Any] = {"query": query, "key": key, "value": value, "lengths": [24, 40]}
    code = "\n".join(blocks)
    assert '"cuda", (2, 4)' in code
    exec(compile(code.replace('"cuda", (2, 4)', '"cpu", (2, 2)'), "distributed.md", "exec"), names)
    assert names["out"].shape == (*query.shape[:3], value.shape[3])


_EVERYWHERE = [
    exact,
    muse,
    muse_that_sees_all,
    groups_that_ranks_cut,
    packed_documents,
    there_and_back,
    rank_before,
    ranks_that_disagree,
]
CHECKS: dict[int, list[Callable[[DeviceMesh], None]]] = {
    1: [exact, muse, one_rank_copies_nothing],
    2: [*_EVERYWHERE, reused_buffers, rows_of_trainers, bytes_moved, memory, compiled, ring],
    4: [*_EVERYWHERE, bytes_moved, memory, of_a_mesh_with_two_dimensions, refusals, ring, documentation],
}
"""By number of ranks."""


def run(rank: int, ranks: int, port: int, report: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    send_reports(CHECKS[ranks], init_device_mesh("cpu", (ranks,)), report)
    dist.destroy_process_group()
