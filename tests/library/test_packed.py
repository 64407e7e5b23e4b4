"""Packed documents: a packed call is one call for each document, and nothing passes between them."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from muse_attention import DocumentBoundaries, MuSeConfig, muse_attention, muse_attn_func, muse_attn_varlen_func
from muse_attention.core.recording import recorded_calls
from muse_attention.defaults import LONGEST_EXACT
from muse_attention.documents.rows import attend_to_documents
from tests.closeness import assert_equal_to_rounding, assert_same, gradients
from tests.refusals import one_line_error

CONFIG = "Q3K4R2B16"
BLOCK = 16


def row(tokens: int, heads: int = 2, key_heads: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Queries, keys and values, (tokens, heads, head_dim)."""
    shapes = ((heads, 8), (key_heads, 8), (key_heads, 6))
    return tuple(torch.randn(tokens, *shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes)


def ends_of(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def ends_tensor(lengths: list[int]) -> Tensor:
    return torch.tensor(ends_of(lengths), dtype=torch.int32)


def packed(tensors: tuple[Tensor, ...], lengths: list[int], **settings: Any) -> Any:
    ends = ends_tensor(lengths)
    settings = {"config": CONFIG, "causal": True} | settings
    return muse_attn_varlen_func(*tensors, ends, ends, max(lengths), max(lengths), **settings)


def loop(tensors: tuple[Tensor, ...], lengths: list[int], **settings: Any) -> tuple[Tensor, Tensor]:
    """The oracle: `muse_attention` of each document."""
    settings = {"config": CONFIG, "is_causal": True} | settings
    results = [
        muse_attention(*(part.transpose(0, 1)[None] for part in parts), enable_gqa=True, return_lse=True, **settings)
        for parts in zip(*(tensor.split(lengths) for tensor in tensors), strict=True)
    ]
    outs = [out[0].transpose(0, 1) for out, _ in results]
    return torch.cat(outs), torch.cat([lse[0] for _, lse in results], 1)


def random_partition(seed: int) -> list[int]:
    """Lengths around the edges of a block among them, in any order."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK, *torch.randint(1, 90, (4,), generator=generator).tolist()]
    return [lengths[index] for index in torch.randperm(len(lengths), generator=generator)]


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "lengths", [random_partition(0), random_partition(1), [70], [1], [BLOCK], [BLOCK + 1]], ids=str
)
def test_packed_equals_the_loop_over_documents(lengths: list[int], causal: bool, backend: str) -> None:
    tensors = row(sum(lengths))
    found = packed(tensors, lengths, causal=causal, backend=backend, return_lse=True)
    assert_same(found, loop(tensors, lengths, is_causal=causal, backend="reference"), tensors)


@pytest.mark.parametrize("config", ["Q3K4T0.03B16", "QK4R1", MuSeConfig.parse("Q4K5R0B16")], ids=str)
def test_grouped_heads_and_other_configurations(config: Any) -> None:
    lengths = [40, 17, 1, 40]
    tensors = row(sum(lengths), heads=6, key_heads=2)
    found = packed(tensors, lengths, config=config, return_lse=True, softmax_scale=0.3)
    assert_same(found, loop(tensors, lengths, config=config, backend="reference", scale=0.3), tensors)


@pytest.mark.long
def test_kernels_give_the_bits_of_the_loop_and_change_no_other_document() -> None:
    """Documents of 20 tokens share their launches. The last one changes."""
    pytest.importorskip("triton")
    lengths = [20, 1, 17, 16, 20]
    tensors = row(sum(lengths), heads=1, key_heads=1, dtype=torch.float32)
    settings: dict[str, Any] = {"config": "QK2R1B16", "backend": "triton"}
    with recorded_calls() as calls:
        found = packed(tensors, lengths, **settings, return_lse=True)
    assert sorted(call.query.shape[0] for call in calls) == [1, 1, 1, 2]
    before = (*found, *gradients(found, tensors))
    expected = loop(tensors, lengths, **settings)
    torch.testing.assert_close(before, (*expected, *gradients(expected, tensors)), rtol=0, atol=0)
    with torch.no_grad():
        for tensor in tensors:
            tensor.split(lengths)[4].mul_(-3).add_(1)
    found = packed(tensors, lengths, **settings, return_lse=True)
    for name, one, two in zip(
        ("output", "lse", "query", "key", "value"), before, (*found, *gradients(found, tensors)), strict=True
    ):
        dim = 1 if name == "lse" else 0
        pairs = zip(one.split(lengths, dim), two.split(lengths, dim), strict=True)
        assert [torch.equal(*pair) for pair in pairs] == [True, True, True, True, False], name


@pytest.mark.parametrize("changed", [0, 2, 4])
def test_a_changed_document_changes_no_other(changed: int) -> None:
    lengths = [33, 1, 48, 16, 48]
    outcomes = []
    for other in (False, True):
        torch.manual_seed(3)
        tensors = row(sum(lengths))
        if other:
            with torch.no_grad():
                for tensor in tensors:
                    tensor.split(lengths)[changed].mul_(-3).add_(1)
        out, lse = packed(tensors, lengths, return_lse=True)
        outcomes.append((out, lse.T, *gradients((out, lse), tensors)))
    for before, after in zip(*outcomes, strict=True):
        for index, (one, two) in enumerate(zip(before.split(lengths), after.split(lengths), strict=True)):
            assert torch.equal(one, two) == (index != changed)


@pytest.mark.parametrize("order", [[40, 9, 70], [70, 40, 9]], ids=str)
def test_what_a_document_gets_does_not_depend_on_where_it_lies(order: list[int]) -> None:
    documents = {length: [tensor.detach() for tensor in row(length)] for length in (9, 40, 70)}
    tensors = tuple(torch.cat([documents[length][side] for length in order]) for side in range(3))
    for length, out in zip(order, packed(tensors, order).split(order), strict=True):
        assert torch.equal(out, packed(tuple(documents[length]), [length]))


def test_a_batch_of_one_length() -> None:
    lengths = [40] * 3
    tensors = row(sum(lengths), heads=4)
    batch = [tensor.unflatten(0, (3, 40)) for tensor in tensors]
    out, lse = muse_attn_func(*batch, causal=True, config=CONFIG, return_lse=True)
    expected, expected_lse = packed(tensors, lengths, return_lse=True)
    assert_equal_to_rounding(out.flatten(0, 1), expected)
    assert_equal_to_rounding(lse.transpose(0, 1).flatten(1), expected_lse)
    assert out.is_contiguous()
    assert torch.equal(muse_attn_func(*batch, causal=True, config=CONFIG), out)


def test_without_a_configuration_short_documents_are_attended_to_exactly() -> None:
    lengths = [LONGEST_EXACT // 4, LONGEST_EXACT + 1]
    tensors = tuple(tensor.detach() for tensor in row(sum(lengths), heads=1, key_heads=1))
    with recorded_calls() as calls:
        found = packed(tensors, lengths, config=None)
        alone = muse_attn_func(*(tensor[None, : lengths[0]] for tensor in tensors), causal=True)
    assert calls[1].config == MuSeConfig.for_length(LONGEST_EXACT + 1)
    one = [tensor[: lengths[0]].transpose(0, 1) for tensor in tensors]
    exact = torch.nn.functional.scaled_dot_product_attention(*one, is_causal=True).transpose(0, 1)
    assert_equal_to_rounding(found[: lengths[0]], exact)
    assert_equal_to_rounding(alone[0], exact)


def test_padding_between_documents_is_left_alone() -> None:
    tensors = row(60)
    boundaries = DocumentBoundaries((5, 45), (40, 50), 60)
    settings: dict[str, Any] = {"is_causal": True, "scale": 8**-0.5}
    out, lse = attend_to_documents(*tensors, boundaries, CONFIG, **settings, return_lse=True)
    assert lse is not None
    documents = tuple(torch.cat([tensor[5:40], tensor[45:50]]) for tensor in tensors)
    expected, expected_lse = loop(documents, [35, 5])
    real = torch.zeros(60, dtype=torch.bool)
    real[5:40] = real[45:50] = True
    assert_equal_to_rounding(out[real], expected)
    assert_equal_to_rounding(lse[:, real], expected_lse)
    assert not out[~real].any()
    for gradient in torch.autograd.grad(out.square().sum(), tensors):
        assert not gradient[~real].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    tensors = row(60, dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        out = packed(tensors, [40, 20])
    assert out.dtype == dtype
    expected = packed(tuple(tensor.to(dtype) for tensor in tensors), [40, 20])
    assert torch.equal(out, expected)


@pytest.mark.parametrize("form", [DocumentBoundaries.from_lengths, ends_tensor], ids=["boundaries", "tensor"])
def test_one_graph_serves_every_batch(form: Any) -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, dynamic=True, fullgraph=True)
    def compiled(query: Tensor, key: Tensor, value: Tensor, ends: Any, longest: int) -> tuple[Tensor, Tensor]:
        settings: dict[str, Any] = {"causal": True, "config": CONFIG, "return_lse": True}
        out, lse = muse_attn_varlen_func(query * 2, key, value, ends, ends, longest, longest, **settings)
        return out + 1, lse

    for lengths in ([40, 20], [2, 59], [17, 16, 27], [60], [30, 1, 30, 9]):
        tensors = row(sum(lengths))
        found = compiled(*tensors, form(lengths), max(lengths))
        out, lse = packed((tensors[0] * 2, *tensors[1:]), lengths, return_lse=True)
        assert_same(found, (out + 1, lse), tensors, str(lengths))
    assert counter.frame_count == 1
    with pytest.raises(ValueError, match="cu_seqlens_q ends at 50, q has 60 tokens"):
        compiled(*row(60), form([20, 30]), 30)
    with pytest.raises(ValueError, match="max_seqlen_q=29 must be an integer of at least 30"):
        compiled(*row(60), form([30, 30]), 29)


@pytest.mark.long
def test_a_batch_of_one_length_compiles_into_one_graph() -> None:
    batch = [tensor.unflatten(0, (2, 40)) for tensor in row(80)]
    torch.compiler.reset()
    for config in (CONFIG, None):
        compiled = torch.compile(muse_attn_func, backend="aot_eager", fullgraph=True)
        found = compiled(*batch, causal=True, config=config)
        assert_equal_to_rounding(found, muse_attn_func(*batch, causal=True, config=config))


def test_a_reused_tensor_is_read_in_every_call() -> None:
    """Whether or not it counts the write as a change of its own."""
    tensors, ends = row(60), ends_tensor([40, 20])

    for end, target in ((40, ends), (17, ends), (30, ends.data), (5, ends.numpy()), (9, ends[:2].detach())):
        target[1] = end
        found = muse_attn_varlen_func(*tensors, ends, ends, 60, 60, causal=True, config=CONFIG)
        assert torch.equal(found, packed(tensors, [end, 60 - end]))


def test_a_compiled_backward_pass_has_the_boundaries_of_its_forward_pass() -> None:
    """Though the tensor has those of the next batch by then."""
    tensors, ends = row(60), ends_tensor([40, 20])
    torch.compiler.reset()
    compiled = torch.compile(muse_attn_varlen_func, backend="aot_eager", fullgraph=True)
    found = compiled(*tensors, ends, ends, 60, 60, causal=True, config=CONFIG, return_lse=True)
    ends.numpy()[1] = 17
    expected = packed(tensors, [40, 20], return_lse=True)
    for ours, theirs in zip(gradients(found, tensors), gradients(expected, tensors), strict=True):
        assert_equal_to_rounding(ours, theirs)


NEUTRAL: dict[str, Any] = {
    "dropout_p": 0.0,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": True,
    "block_table": None,
    "return_attn_probs": False,
}


def test_calls_of_flash_attention_keep_their_neutral_arguments() -> None:
    """In one compiled graph, too."""
    tensors, ends = row(60), [0, 40, 60]
    batch = [tensor.unflatten(0, (2, 30)) for tensor in tensors]
    torch.compiler.reset()
    for function, arguments in ((muse_attn_varlen_func, (*tensors, ends, ends, 40, 40)), (muse_attn_func, batch)):
        expected = function(*arguments, causal=True, config=CONFIG)
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        for attend in (function, compiled):
            found = attend(*arguments, causal=True, config=CONFIG, **NEUTRAL)
            assert torch.equal(found, expected)
        with pytest.raises(TypeError, match="positional arguments"):  # FlashAttention 2 has dropout_p there
            function(*arguments, 0.0, causal=True)
        with pytest.raises(TypeError, match="num_splits=1 is not an argument of this function"):
            function(*arguments, num_splits=1)


def test_boundaries_in_every_form() -> None:
    tensors = row(60)
    expected = packed(tensors, [40, 20])
    for ends in ([0, 40, 60], (0, 40, 60), DocumentBoundaries.from_lengths([40, 20])):
        found = muse_attn_varlen_func(*tensors, ends, ends, 40, 40, causal=True, config=CONFIG)
        assert torch.equal(found, expected)


def test_the_mask_of_documents() -> None:
    boundaries = DocumentBoundaries((0, 3), (2, 5), 5)
    expected = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]])
    assert torch.equal(boundaries.mask(1, is_causal=True)[0], expected.bool())
    assert torch.equal(boundaries.mask(1, is_causal=False)[0], (expected | expected.T).bool())
    rows = DocumentBoundaries((0, 1), (1, 4), 4).mask(2, is_causal=True)
    assert torch.equal(rows, torch.tensor([[[1, 0], [0, 1]], [[1, 0], [1, 1]]]).bool())


def test_documents_are_cut() -> None:
    boundaries = DocumentBoundaries((2, 9), (9, 12), 14)
    assert boundaries.cut_at([0, 5, 9, 12, 13]) == DocumentBoundaries((2, 5, 9), (5, 9, 12), 14)
    rows = DocumentBoundaries((0, 3, 9, 12), (3, 8, 12, 16), 16)
    assert rows.in_columns(2, 2, 6) == DocumentBoundaries((0, 1, 4, 6), (1, 4, 6, 8), 8)
    assert rows.in_columns(2, 0, 8) == rows
    assert rows.in_columns(2, 3, 4) == DocumentBoundaries((0, 1), (1, 2), 2)


INT32 = {"dtype": torch.int32}


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (torch.tensor([0, 40, 30, 60], **INT32), "cu_seqlens_q must ascend, but 30 follows 40"),
        (torch.tensor([0, 40, 40, 60], **INT32), "must ascend, but 40 follows 40: leave out documents without tokens"),
        (torch.tensor([0, 40, 59], **INT32), "cu_seqlens_q ends at 59, q has 60 tokens"),
        (torch.tensor([0, 40, 61], **INT32), "cu_seqlens_q ends at 61, q has 60 tokens"),
        (torch.tensor([1, 40, 60], **INT32), "cu_seqlens_q must begin with 0"),
        (torch.tensor([0], **INT32), "the end of at least one document must follow"),
        (torch.tensor([], **INT32), "cu_seqlens_q must begin with 0"),
        (torch.tensor([0, 40, 60]), "cu_seqlens_q has dtype torch.int64 and shape (3,); it must be int32"),
        (torch.tensor([[0, 40, 60]], **INT32), "shape (1, 3); it must be int32 with one axis"),
        (torch.zeros(3, **INT32, device="meta"), "cu_seqlens_q is on meta, q on cpu; move it there, or to the CPU"),
        ([0, 40.0, 60], "cu_seqlens_q must be an int32 tensor, a list of integers, or DocumentBoundaries"),
        ([0, 10**30], f"a row of {10**30} tokens is too long; at most 2147483647"),
        (torch.tensor([0, 40, 60], **INT32).to_sparse(), "cu_seqlens_q is a torch.sparse_coo tensor; it must be dense"),
        (60, "cu_seqlens_q must be an int32 tensor"),
        (None, "cu_seqlens_q must be an int32 tensor"),
    ],
)
def test_bad_boundaries_are_refused_in_one_line(ends: Any, message: str) -> None:
    with one_line_error(re.escape(message)):
        muse_attn_varlen_func(*row(60), ends, ends, 60, 60)


def test_other_mistakes_are_refused_in_one_line() -> None:
    q, k, v = row(60)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_seqlen_q": 39}, "max_seqlen_q=39 must be an integer of at least 40, the length of the longest document"),
        ({"max_seqlen_k": 39}, "max_seqlen_k=39 must be an integer of at least 40"),
        ({"max_seqlen_k": None}, "max_seqlen_k=None must be an integer"),
        ({"cu_seqlens_k": [0, 30, 60]}, "cu_seqlens_q and cu_seqlens_k differ"),
        ({"q": q[None]}, "q has shape (1, 60, 2, 8); it must be a tensor with 3 axes: (tokens, heads, head_dim)"),
        ({"k": None}, "k has type NoneType; it must be a tensor with 3 axes"),
        ({"k": k[:50]}, "key has length 50, query 60"),
        ({"q": q[:, :1]}, "query has 1 heads, not a multiple of the 2 heads of key"),
        ({"backend": "cuda"}, "backend='cuda' is unknown"),
        ({"config": "X4"}, "cannot read 'X4'"),
        ({"config": {}}, "config={} is a dict; it must be a MuSeConfig, a string like 'QK32R2B1k', or None"),
        ({"softmax_scale": "1"}, "scale='1' must be a number"),
        ({"softmax_scale": 0.0}, "scale=0.0 makes all logits equal"),
        ({"dropout_p": 0.1}, "dropout_p=0.1 is not supported; leave it out, or pass 0.0"),
        ({"window_size": (128, 0)}, "window_size=(128, 0) is not supported; leave it out, or pass (-1, -1)"),
        ({"softcap": 30.0}, "softcap=30.0 is not supported; leave it out, or pass 0.0"),
        ({"alibi_slopes": torch.ones(2)}, "alibi_slopes=a tensor is not supported; leave it out, or pass None"),
        ({"return_attn_probs": True}, "return_attn_probs=True is not supported; leave it out, or pass False"),
        ({"causal": None}, "is_causal is a NoneType"),
    ]
    good = {"q": q, "k": k, "v": v, "cu_seqlens_q": [0, 40, 60], "cu_seqlens_k": [0, 40, 60]}
    for change, message in cases:
        with one_line_error(re.escape(message)):
            muse_attn_varlen_func(**({**good, "max_seqlen_q": 40, "max_seqlen_k": 40} | change))
    with pytest.raises(ValueError, match=r"q has shape \(60, 2, 8\); it must be a tensor with 4 axes"):
        muse_attn_func(q, k, v)
    with pytest.raises(ValueError, match=r"query has shape \(1, 2, 0, 8\); every axis must be at least 1"):
        muse_attn_varlen_func(q[:0], k[:0], v[:0], [0, 1], [0, 1], 1, 1)


@pytest.mark.parametrize(
    ("begins", "ends", "tokens", "message"),
    [
        ((), (), 9, "a row needs at least one document"),
        ((0, 4), (4, 4), 9, "the document from 4 to 4 has no token; leave it out"),
        ((0, 5), (4, 4), 9, "the document from 5 to 4 has no token"),
        ((0, 4), (4, 9), 5, "documents must follow each other inside a row of 5 tokens"),
        ((0, 3), (4, 9), 9, "documents must follow each other"),
        ((0, 4), (4,), 9, "2 documents begin and 1 end; give each both"),
        ((0, 4.0), (4, 9), 9, "must be integers"),
        (torch.tensor([0, 4]), torch.tensor([4, 9]), 9, "must be integers (for a tensor: tolist())"),
    ],
)
def test_bad_documents_are_refused_in_one_line(begins: Any, ends: Any, tokens: int, message: str) -> None:
    with one_line_error(re.escape(message)):
        DocumentBoundaries(begins, ends, tokens)


@pytest.mark.parametrize("lengths", [None, 60, "60", [40, None], [40, 2.5], torch.tensor([40, 20])], ids=str)
def test_lengths_that_are_no_integers_are_refused_in_one_line(lengths: Any) -> None:
    with pytest.raises(ValueError, match=r"^lengths must be a list of integers \(for a tensor: tolist\(\)\)$"):
        DocumentBoundaries.from_lengths(lengths)
