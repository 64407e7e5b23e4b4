"""Evaluation while a model trains: its loss on the held-out split, and its answers to needles.

Samples are evenly spaced windows of the held-out split. Needle documents are made of held-out files, with names and
uids that training never draws. Both are evaluated under the attention of the update and under exact attention, and are
the same at every evaluation of a run, and on any number of ranks, which share them. Where ranks share each sequence,
all of them ask, and each counts its own part of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from muse_attention.huggingface import use_attention
from muse_lab.pretraining.batches import Windows
from muse_lab.pretraining.data.corpus import HELD_OUT, Corpus
from muse_lab.pretraining.document_mask import separate_documents
from muse_lab.pretraining.model.chunked_loss import IGNORED
from muse_lab.pretraining.model.decoder import DecoderForCausalLM
from muse_lab.pretraining.model.sequence_parts import own_part
from muse_lab.pretraining.monitoring.metrics import EXACT_END
from muse_lab.pretraining.needles.mixture import NeedleDocuments
from muse_lab.pretraining.needles.writer import EVALUATION
from muse_lab.pretraining.parallel import World, gathered
from muse_lab.pretraining.recipes import Recipe
from muse_lab.records.attention_names import EXACT

_Document = tuple[Tensor, Tensor]
"""(length + 1,) tokens that a rank evaluates, and which of them count as targets: none where a rank has fewer documents
than others."""


class Evaluation:
    def __init__(self, corpus: Corpus, recipe: Recipe, world: World) -> None:
        """Raises ValueError if the held-out split has too little text."""
        self._world = world
        self._end = corpus.manifest.end if recipe.document_mask else None
        self._windows = self._share(_held_out(corpus, recipe))
        self._needles = self._share(_needles(corpus, recipe))

    def run(self, model: DecoderForCausalLM, on_sample: Callable[[], None]) -> dict[str, float]:
        """Mean nats for each token, and the share of needles whose every token is the most probable one.

        If the model's attention is not exact attention, the same under exact attention too.

        Collective: every rank must call it. `on_sample` is called after every sample, and may raise.
        """
        with gathered(model):  # shards the weights again at the end, as a forward pass alone does not
            measured = self._measure(model, on_sample)
            if model.config.attention != EXACT:
                with use_attention(model, EXACT):
                    measured |= {f"{name}{EXACT_END}": value for name, value in self._measure(model, on_sample).items()}
        return measured

    def _measure(self, model: DecoderForCausalLM, on_sample: Callable[[], None]) -> dict[str, float]:
        """Measurements under the model's current attention."""
        loss, tokens, *_ = self._ask_all(model, self._windows, on_sample)
        measured = {"held_out_loss": loss / tokens}
        if self._needles:
            loss, tokens, right, answers = self._ask_all(model, self._needles, on_sample, with_answers=True)
            measured |= {"needles_loss": loss / tokens, "needles_right": right / answers}
        return measured

    def _ask_all(
        self,
        model: DecoderForCausalLM,
        documents: list[_Document],
        on_sample: Callable[[], None],
        *,
        with_answers: bool = False,
    ) -> list[float]:
        """The means over ranks of the sums of `_ask`."""
        total = torch.zeros(4, dtype=torch.float64, device=self._world.device)
        for document in documents:
            total += self._ask(model, document, with_answers=with_answers)
            on_sample()
        return self._world.mean(total).tolist()

    @torch.no_grad()
    def _ask(self, model: DecoderForCausalLM, document: _Document, *, with_answers: bool) -> Tensor:
        """(4,) float64: summed loss and tokens, of this rank's part; right answers, and answers, of all parts."""
        tokens, counts = (tensor.to(model.device) for tensor in document)
        ids, positions, labels = tokens[None, :-1], None, tokens[None, 1:]
        if self._end is not None:
            ids, positions, labels = separate_documents(tokens[None], self._end)
        targets = labels[0].masked_fill(~counts[1:], IGNORED)
        own_targets = own_part(targets, self._world.sequence, 0)
        places = torch.nonzero(own_targets != IGNORED)[:, 0]
        out = model(
            ids,
            position_ids=positions,
            shift_labels=targets[None],
            num_items_in_batch=1,
            use_cache=False,
            **({"logits_to_keep": places} if with_answers else {}),
        )
        right, answers = 0, 0
        if with_answers:
            is_right = torch.zeros_like(own_targets)
            is_right[places] = (out.logits[0].argmax(-1) == own_targets[places]).long()
            right, answers = _count_right(self._world.joined(is_right).bool().cpu(), (targets != IGNORED).cpu())
        counted = torch.tensor([len(places), right, answers], dtype=torch.float64, device=model.device)
        return torch.cat([out.loss.double()[None], counted])

    def _share(self, documents: list[_Document]) -> list[_Document]:
        """The documents of this group of ranks: each group has as many, because all must call the model together."""
        ranks, rank = self._world.data_ranks, self._world.data_rank
        missing = -len(documents) % ranks
        if documents:
            tokens, counts = documents[0]
            documents = documents + [(tokens, torch.zeros_like(counts))] * missing
        return documents[rank::ranks]


def _count_right(is_right: Tensor, counts: Tensor) -> tuple[int, int]:
    """Number of right answers, with every token right, and of all; neighbouring tokens that count are one answer."""
    places = torch.nonzero(counts)[:, 0]
    if not len(places):
        return 0, 0
    answer = torch.cat([torch.zeros(1, dtype=torch.int64), (places.diff() != 1).cumsum(0)])
    wrong = torch.bincount(answer, weights=(~is_right[places]).double())
    return int((wrong == 0).sum()), len(wrong)


def _held_out(corpus: Corpus, recipe: Recipe) -> list[_Document]:
    try:
        windows = Windows(corpus, recipe.length, split=HELD_OUT)
    except ValueError as error:
        raise ValueError(f"{error}, or set evaluate_every=0") from None
    spaced = windows.spaced(min(recipe.evaluate_samples, len(windows)))
    return [(tokens, torch.ones_like(tokens, dtype=torch.bool)) for tokens in spaced]


def _needles(corpus: Corpus, recipe: Recipe) -> list[_Document]:
    if not recipe.evaluate_needles:
        return []
    try:
        documents = NeedleDocuments(
            corpus, recipe.length, share=1.0, seed=recipe.seed, split=HELD_OUT, purpose=EVALUATION
        )
    except ValueError as error:
        raise ValueError(f"{error}; or set evaluate_needles=0") from None
    pairs = (documents.make_with_answers(number) for number in range(recipe.evaluate_needles))
    return [(tokens, distances > 0) for tokens, distances in pairs]
