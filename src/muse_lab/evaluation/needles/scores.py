"""How a model answers the questions of a needle sample: by greedy generation, and by its probabilities of uids.

The prompt is read once, by the attention under test, into a KV cache. The first token of the first uid is predicted by
that attention; everything after it attends exactly to the keys and values that it left. After each question the right
uid is fed, whatever the model would have said, and the next question follows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muse_attention.core.precision import compute_dtype
from muse_lab.models import PreTrainedModel, PreTrainedTokenizerBase
from muse_lab.pretraining.needles.samples import Question, Sample

if TYPE_CHECKING:
    from transformers.cache_utils import DynamicCache

_CACHED_AT_ONCE = 2**17
"""Tokens of all copies of the cache that candidates are scored with at the same time."""


@dataclass(frozen=True)
class Answer:
    """The answer to one question."""

    bucket: int
    """of the definition"""
    uid: str
    """the right one"""
    generated: str
    """greedily, as many tokens as the uid has"""
    is_exact: bool
    """whether the leading digits of `generated` are the uid, in whatever tokens"""
    is_preferred: bool
    """whether the uid is more probable than every other candidate"""
    log_probability: float
    """of the uid, in nats"""
    margin: float
    """by how much that is above the best of the other candidates"""
    ranks: tuple[int, ...]
    """of each token of the uid, given those before it: how many tokens are more probable"""


def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sample: Sample, attention: str
) -> tuple[Answer, ...]:
    """Answer all questions of a sample. Raises ValueError if a probability is not a number."""
    from transformers import DynamicCache

    from muse_attention.huggingface import use_attention

    tokens = torch.from_numpy(sample.tokens).to(model.device)
    cache = DynamicCache()  # without the model's config: layers with a window keep all keys, and mask them
    answers, done = [], 0
    with torch.no_grad():
        for number, question in enumerate(sample.questions):
            with use_attention(model, "exact" if number else attention):
                last = _read(model, tokens[None, done : question.answer.start], cache)[0, -1]
            with use_attention(model, "exact"):
                answers.append(_answer(model, tokenizer, question, last, cache))
            done = question.answer.start
    return tuple(answers)


def _answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    question: Question,
    last: Tensor,
    cache: DynamicCache,
) -> Answer:
    """`last` is the logits (vocabulary) behind the prompt that is in the cache, which stays as it is."""
    candidates = torch.from_numpy(question.candidates).to(model.device)
    at_once = max(1, _CACHED_AT_ONCE // cache.get_seq_length())
    parts = [_log_probabilities(model, part, last, cache) for part in candidates.split(at_once)]
    token_scores = torch.cat(
        [part.gather(2, ids[..., None]) for part, ids in zip(parts, candidates.split(at_once), strict=True)]
    )
    totals = token_scores.sum((1, 2))
    if not torch.isfinite(totals).all():
        raise ValueError(f"a probability is not a finite number in {model.dtype}; use another dtype")
    right, uid = parts[0][0], candidates[0]
    ranks = (right > right.gather(1, uid[:, None])).sum(1).tolist()
    generated = tokenizer.decode(_generate(model, right, uid, cache))
    margin = float(totals[0] - totals[1:].max())
    return Answer(
        bucket=question.bucket,
        uid=question.needle.uid,
        generated=generated,
        is_exact=_leading_digits(generated) == question.needle.uid,
        is_preferred=margin > 0,
        log_probability=float(totals[0]),
        margin=margin,
        ranks=tuple(ranks),
    )


def _leading_digits(text: str) -> str:
    return "".join(itertools.takewhile(str.isdecimal, text))


def _log_probabilities(model: PreTrainedModel, candidates: Tensor, last: Tensor, cache: DynamicCache) -> Tensor:
    """(candidates, tokens of a uid, vocabulary): of every possible token at each place of each candidate."""
    logits = last.expand(len(candidates), 1, -1)
    if candidates.shape[1] > 1:
        further = _read(model, candidates[:, :-1], _copies(cache, len(candidates)), keep=0)
        logits = torch.cat([logits, further], dim=1)
    return logits.log_softmax(-1, dtype=compute_dtype(logits.dtype))


def _generate(model: PreTrainedModel, right: Tensor, uid: Tensor, cache: DynamicCache) -> list[int]:
    """Generate as many tokens as the uid has, each the most probable one.

    While they are those of the uid, the next one is known from `right`, (tokens, vocabulary).
    """
    best = right.argmax(-1)
    wrong = (best != uid).nonzero()
    if not len(wrong):
        return best.tolist()
    agree = int(wrong[0])
    tokens: list[int] = best[: agree + 1].tolist()
    own = _copies(cache, 1)
    fed = 0
    while len(tokens) < len(uid):
        logits = _read(model, torch.tensor([tokens[fed:]], device=uid.device), own)
        fed = len(tokens)
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def _read(model: PreTrainedModel, ids: Tensor, cache: DynamicCache, *, keep: int = 1) -> Tensor:
    """The logits of the last `keep` of (batch, length) ids that follow what is in the cache, of all of them for 0."""
    logits: Tensor = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=keep).logits
    return logits


def _copies(cache: DynamicCache, number: int) -> DynamicCache:
    from transformers import DynamicCache

    copies = DynamicCache()
    for index, layer in enumerate(cache.layers):
        copies.update(layer.keys.expand(number, -1, -1, -1), layer.values.expand(number, -1, -1, -1), index)
    return copies
