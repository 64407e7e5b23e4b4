"""Training: a loop whose every step is a function of the recipe, its initial weights, the corpus and the step's number.

    from muse_attention.pretraining.recipes import override, tiny
    from muse_attention.pretraining.training import train

    train(read_corpus(Path("out/corpus")), override(tiny(), ["steps=100"]), Path("out/train"))

Checkpoints have the whole state: a run that was killed at any moment continues from its newest complete checkpoint,
and is bitwise equal to an uninterrupted run.

The folder of a run is that of run_folder.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from muse_attention.files import errors_naming, replace_file, replace_folder
from muse_attention.pretraining import checkpoints
from muse_attention.pretraining.batches import Batches, Windows
from muse_attention.pretraining.continuing import begin_with_finished
from muse_attention.pretraining.data.corpus import Corpus
from muse_attention.pretraining.document_mask import check_packed, separate_documents
from muse_attention.pretraining.initial_model import WEIGHTS, make_config, make_model, read_initial
from muse_attention.pretraining.metrics import Metrics, Step, check_tensorboard
from muse_attention.pretraining.model.chunked_loss import IGNORED
from muse_attention.pretraining.model.configuration import DecoderConfig
from muse_attention.pretraining.model.decoder import DecoderForCausalLM
from muse_attention.pretraining.needles.mixture import NeedleDocuments
from muse_attention.pretraining.optimiser import are_finite, learnt, make_optimiser, restore, set_learning_rate
from muse_attention.pretraining.parallel import World, accumulate_gradients, gathered, shard_model, whole
from muse_attention.pretraining.probe import answers_loss, measure_attention
from muse_attention.pretraining.reading import ReaderError, ReadingError, can_read_ahead, read_ahead, read_batches
from muse_attention.pretraining.recipes import Recipe
from muse_attention.pretraining.run_folder import (
    CHECKPOINTS,
    MODEL,
    check_may_start,
    claimed,
    describe_changes,
    describe_last_good,
    describe_run,
    find_checkpoint,
    with_full_name,
    write_run,
)
from muse_attention.pretraining.schedule import EXACT, learning_rate


class TrainingError(RuntimeError):
    """A run cannot continue; its state so far is in its checkpoints."""


def train(
    corpus: Corpus,
    recipe: Recipe,
    output: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    continue_from: Path | None = None,
    world: World | None = None,
    tensorboard: bool = False,
    on_step: Callable[[Step], None] = lambda step: None,
    on_refused: Callable[[str], None] = lambda message: None,
    on_note: Callable[[str], None] = lambda message: None,
) -> Path:
    """Train a model, and return the folder that it is in.

    Raises ValueError for bad arguments, TrainingError if the run cannot continue.

    Args:
        resume: continue the run in `output`, or start one if there is none
        overwrite: remove the run in `output` first
        continue_from: folder of a finished run to begin with; the recipe is that of `continuing.further_recipe`
        on_step: called after every update, on the first rank
        on_refused: told why a checkpoint is not used
        on_note: told of lost lines of metrics and of changed versions when a run continues
    """
    world = world or World(torch.device("cpu"))
    batches = make_batches(corpus, recipe, world.ranks)
    if recipe.batch // world.ranks % recipe.micro_batch:
        raise ValueError(
            f"micro_batch={recipe.micro_batch} does not divide the {recipe.batch // world.ranks} sequences of a rank"
        )
    if tensorboard:
        check_tensorboard()
    probed = [] if batches.mixture is None else batches.mixture.make_probes(world.rank, world.ranks)
    tokenizer = {name: corpus.read_file(name) for name in corpus.manifest.files}  # the corpus may be gone at the end
    with claimed(output, world, overwrite=overwrite):  # before anything is decided by what is in there
        if continue_from is not None:
            begin_with_finished(continue_from, output, recipe, corpus, world)
        recipe = with_full_name(recipe, output, world.device)
        checkpoint = None
        if resume or continue_from is not None:
            checkpoint = find_checkpoint(output, recipe, corpus, on_refused if world.is_first else lambda message: None)
        else:
            check_may_start(output)
        step = 0 if checkpoint is None else checkpoint.step
        initial = read_initial(corpus, recipe) if recipe.initial and checkpoint is None else None
        about = describe_run(recipe, corpus, initial.fingerprint if initial else None, checkpoint)
        folder = output / CHECKPOINTS
        lowest, highest = world.range_of(step)  # all have looked before the first one writes
        if lowest != highest:
            raise TrainingError(
                f"some ranks would continue from step {lowest} and some from step {highest}: not all of them see all "
                f"files in {folder} yet; resume again in a minute"
            )
        if world.is_first:
            if checkpoint is not None and (changes := describe_changes(checkpoint, about, world.device)):
                on_note(changes)
            write_run(output, about)
            checkpoints.clear_unfinished(folder)
            checkpoints.clear_after(folder, step)
        with determinism(recipe, world.device):
            model = make_model(corpus, recipe, initial.tensors if initial else None).to(world.device)
            del initial
            optimiser = make_ready(model, recipe, world)
            if checkpoint is not None:
                restore(model, optimiser, checkpoint)
            metrics = None
            if world.is_first:
                metrics = Metrics(output, step, tensorboard=tensorboard, on_broken=on_note)
            run = _Run(model, optimiser, recipe, batches, world, folder, about, metrics, probed)
            try:
                with contextlib.closing(run.steps(step)) as steps:
                    for done in steps:
                        if metrics is not None:
                            metrics.add(done)
                            on_step(done)
            finally:
                if metrics is not None:
                    metrics.close()
        return _write_model(model, make_config(corpus, recipe), tokenizer, recipe, output, world)


def make_batches(corpus: Corpus, recipe: Recipe, ranks: int = 1) -> Batches:
    check_packed(corpus, recipe.length, recipe.document_mask)
    mixture = None
    if recipe.mixture == "niah":
        mixture = NeedleDocuments(corpus, recipe.length, share=recipe.mixture_share, seed=recipe.seed)
    return Batches(Windows(corpus, recipe.length), recipe.batch, recipe.seed, ranks, mixture)


def make_ready(model: DecoderForCausalLM, recipe: Recipe, world: World) -> torch.optim.AdamW:
    """Recompute, compile and shard a model as the recipe and the world say, and return its optimiser."""
    if recipe.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if recipe.compile:
        # By options, as the backward pass is compiled later: no kernel is chosen by its time, where that changes bits.
        options = {"deterministic": True} if recipe.deterministic else None
        for layer in model.model.layers:  # two kinds of layers are two short graphs, for any number of them
            layer.compile(options=options)
    shard_model(model, model.model.layers, world)
    return make_optimiser(model, recipe)


class _Probe(NamedTuple):
    """What was measured beside an update, as `Step` has it."""

    errors: dict[int, float]
    means: dict[str, float]
    answers: float | None


@dataclasses.dataclass
class _Run:
    model: DecoderForCausalLM
    optimiser: torch.optim.AdamW
    recipe: Recipe
    batches: Batches
    world: World
    folder: Path
    """of the checkpoints"""
    about: dict[str, Any]
    """what each of them says of the run"""
    metrics: Metrics | None
    """on the first rank"""
    probed: list[tuple[Tensor, Tensor]]
    """documents, and which of their tokens are answers, of this rank"""

    def steps(self, first: int) -> Generator[Step]:
        """Every update from `first` on, and a checkpoint behind those that are to have one."""
        recipe = self.recipe
        with contextlib.closing(self._read(range(first, recipe.updates))) as batches:
            for step in range(first, recipe.updates):
                done = self._update(step, batches)
                yield done  # before its checkpoint: a line too many is forgotten when the run goes on
                if done.step % recipe.checkpoint_every == 0 or done.step == recipe.updates:
                    self._save(done.step)

    def _update(self, step: int, batches: Iterator[Tensor]) -> Step:
        recipe, model = self.recipe, self.model
        began = time.perf_counter()
        tokens = next(batches)
        attention = recipe.attention_at(step)
        if model.config.attention != attention:
            model.set_attention(attention)
        rate = learning_rate(
            step, steps=recipe.steps, warmup=recipe.warmup, peak=recipe.peak_rate, final=recipe.final_rate
        )
        set_learning_rate(self.optimiser, rate)
        self.optimiser.zero_grad()
        loss = self.world.mean(self._differentiate(tokens)).item()
        norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)).item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            what, value = ("gradient", norm) if math.isfinite(loss) else ("loss", loss)
            raise TrainingError(
                f"the {what} of step {step + 1} is {value}; {describe_last_good(self.folder)}; "
                "start again from its recipe with a lower peak_rate"
            )
        seconds = time.perf_counter() - began
        # Of the weights that the loss is of; before the first forward pass of the whole model, FSDP runs no part of it.
        probe = self._probe(tokens) if self._is_probed(step) else _Probe({}, {}, None)
        began = time.perf_counter()
        self.optimiser.step()
        seconds += time.perf_counter() - began
        return Step(
            step=step + 1,
            loss=loss,
            learning_rate=rate,
            gradient_norm=norm,
            attention=attention,
            tokens=(step + 1) * recipe.tokens_per_step,
            tokens_per_second=round(recipe.tokens_per_step / seconds, 3),
            rse=probe.errors,
            attention_means=probe.means,
            answers_loss=probe.answers,
        )

    def _differentiate(self, tokens: Tensor) -> Tensor:
        """The mean loss of this rank's sequences, and its gradients, which ranks average."""
        total = torch.zeros((), device=self.world.device)
        parts = tokens.split(self.recipe.micro_batch)
        counted: Tensor | int = tokens[:, 1:].numel()
        end = self.batches.windows.corpus.manifest.end
        if self.recipe.document_mask:  # ranks may count different numbers of targets
            targets = (separate_documents(tokens, end).shift_labels != IGNORED).sum()
            counted = self.world.mean(targets.float()).clamp(min=1)
        for number, part in enumerate(parts):
            accumulate_gradients(self.model, is_last=number == len(parts) - 1)
            ids, labels, positions = part[:, :-1], part[:, 1:].contiguous(), None
            if self.recipe.document_mask:
                ids, positions, labels = separate_documents(part, end)
            with self._autocast():
                loss = self.model(
                    ids, position_ids=positions, shift_labels=labels, num_items_in_batch=counted, use_cache=False
                ).loss
            loss.backward()
            total += loss.detach()
        return total

    def _read(self, steps: range) -> Generator[Tensor]:
        """Windows are read at once, but needle documents take time to write."""
        read = read_ahead if can_read_ahead() and self.batches.mixture is not None else read_batches
        try:
            with contextlib.closing(read(self.batches, steps, self.world.rank)) as batches:
                for tokens in batches:
                    yield tokens.to(self.world.device)
        except ReaderError as error:
            raise TrainingError(f"{error}; {describe_last_good(self.folder)}; resume the run") from None
        except ReadingError as error:
            raise TrainingError(
                f"the corpus in {self.batches.windows.corpus.folder} cannot be read any more ({error}); "
                f"{describe_last_good(self.folder)}; run muse prepare again as before, then resume the run"
            ) from None

    def _is_probed(self, step: int) -> bool:
        every = self.recipe.probe_every
        has_something = self.recipe.attention != EXACT or self.probed
        return every > 0 and (step + 1) % every == 0 and bool(has_something)

    def _probe(self, tokens: Tensor) -> _Probe:
        """What an attention that has errors does on the first sequence of each rank; and the loss of answers."""
        errors: dict[int, float] = {}
        means: dict[str, float] = {}
        answers = None
        with self._autocast(), gathered(self.model), torch.compiler.set_stance("force_eager"):
            if self.recipe.attention != EXACT:
                found = measure_attention(self.model, tokens[:1, :-1], self.recipe.attention)
                numbers = torch.tensor([list(layer.values()) for layer in found.values()], device=self.world.device)
                of_layers = self.world.mean(numbers).tolist()
                layers = [
                    dict(zip(layer, of_layer, strict=True))
                    for layer, of_layer in zip(found.values(), of_layers, strict=True)
                ]
                errors = {number: layer["relative_squared_error"] for number, layer in zip(found, layers, strict=True)}
                means = (
                    {name: statistics.fmean(layer[name] for layer in layers) for name in layers[0]} if layers else {}
                )
            if self.probed:
                answers = self.world.mean(answers_loss(self.model, self.probed)).item()
        return _Probe(errors, means, answers)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.recipe.precision == "bfloat16")

    def _save(self, step: int) -> None:
        world, folder = self.world, self.folder
        tensors = learnt(self.model, self.optimiser)
        if not world.all_succeed(are_finite(tensors.values())):
            raise TrainingError(
                f"the weights after step {step} are not finite, and are not kept; {describe_last_good(folder)}; "
                "start again from its recipe with a lower peak_rate"
            )

        def finish() -> None:
            if self.metrics is not None:
                self.metrics.sync()  # a run that goes on from this checkpoint has all lines before it
            checkpoints.finish(folder, step, self.about, ranks=world.ranks)
            checkpoints.prune(folder, step, self.recipe.keep)

        self._together(lambda: checkpoints.begin(folder, step), first_alone=True)
        self._together(lambda: checkpoints.write_shard(folder, step, world.rank, tensors))
        self._together(finish, first_alone=True)

    def _together(self, action: Callable[[], None], *, first_alone: bool = False) -> None:
        """No rank waits forever for one that failed."""
        mishap = None
        try:
            if self.world.is_first or not first_alone:
                action()
        except OSError as error:
            mishap = error
        if not self.world.all_succeed(mishap is None):
            if self.world.is_first:
                checkpoints.clear_unfinished(self.folder)  # it may be what fills the disk
            raise mishap or TrainingError(
                f"another rank cannot write its checkpoint; {describe_last_good(self.folder)}"
            )


def _write_model(
    model: DecoderForCausalLM,
    config: DecoderConfig,
    tokenizer: dict[str, bytes],
    recipe: Recipe,
    output: Path,
    world: World,
) -> Path:
    """As transformers reads it, with the attention of the last step; all ranks give their weights, the first writes."""
    weights = {}
    for name, parameter in model.named_parameters():
        weight = whole(parameter).detach()
        if world.is_first:
            weights[name] = weight.cpu()
    folder, unfinished = output / MODEL, output / f"{MODEL}.tmp"
    if world.is_first:
        config.attention = recipe.attention_at(recipe.updates - 1)
        config.architectures = [DecoderForCausalLM.__name__]
        try:
            with errors_naming(folder):
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                config.save_pretrained(unfinished)
                replace_file(unfinished / WEIGHTS, save(weights, metadata={"format": "pt"}))
                for name, content in tokenizer.items():
                    (unfinished / name).write_bytes(content)
                replace_folder(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)  # it may be what fills the disk
    return folder


@contextlib.contextmanager
def determinism(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Make a run on CUDA bitwise reproducible: every operator must be, as PyTorch's attention knows no other way."""
    if not (recipe.deterministic and device.type == "cuda"):
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA's first product is made
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    except TrainingError:
        raise
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise TrainingError(f"{first_line}; with deterministic=false the run is not bitwise reproducible") from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fill
