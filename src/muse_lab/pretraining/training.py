"""Training: a loop whose every step is a function of the recipe, its initial weights, the corpus and the step's number.

    from muse_lab.pretraining.recipes import override, tiny
    from muse_lab.pretraining.training import train

    train(read_corpus(Path("out/corpus")), override(tiny(), ["steps=100"]), Path("out/train"))

Checkpoints have the whole state: a run that was killed at any moment continues from its newest complete checkpoint,
and is bitwise equal to an uninterrupted run.

`loop.py` has the updates; `run/folder.py` tells what a run has on disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from muse_lab.pretraining.batches import Batches, Windows
from muse_lab.pretraining.checkpoints import store as checkpoints
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.determinism import determinism
from muse_lab.pretraining.document_mask import check_packed
from muse_lab.pretraining.initial_model import make_config, make_model, read_initial
from muse_lab.pretraining.interruptions.failures import (
    Failures,
    StepError,
    TrainingError,
    forget_failures,
    note_failure,
    note_fallback,
    read_failures,
)
from muse_lab.pretraining.interruptions.stopping import Stopping
from muse_lab.pretraining.loop import Loop
from muse_lab.pretraining.mesh_shape import choose_shape
from muse_lab.pretraining.model.decoder import DecoderForCausalLM
from muse_lab.pretraining.monitoring.boards import TENSORBOARD, WANDB, Boards, check_installed
from muse_lab.pretraining.monitoring.held_out import Evaluation
from muse_lab.pretraining.monitoring.metrics import Metrics, Step
from muse_lab.pretraining.monitoring.probe import Probe
from muse_lab.pretraining.needles.mixture import NeedleDocuments
from muse_lab.pretraining.optimiser import make_optimiser, restore
from muse_lab.pretraining.parallel import (
    World,
    is_of_lost_rank,
    shard_model,
    share_sequences,
)
from muse_lab.pretraining.recipes import Recipe
from muse_lab.pretraining.run.continuing import begin_with_finished
from muse_lab.pretraining.run.folder import (
    CHECKPOINTS,
    claimed,
    describe_changes,
    describe_run,
    find_checkpoint,
    has_learnt,
    state_of,
    with_full_name,
    write_run,
)
from muse_lab.pretraining.run.saving import Saver
from muse_lab.pretraining.run.trained_model import write_model


def train(
    corpus: Corpus,
    recipe: Recipe,
    output: Path,
    *,
    overwrite: bool = False,
    continue_from: Path | None = None,
    world: World | None = None,
    tensorboard: bool = False,
    wandb: bool = False,
    stopping: Stopping | None = None,
    on_step: Callable[[Step], None] = lambda step: None,
    on_refused: Callable[[str], None] = lambda message: None,
    on_note: Callable[[str], None] = lambda message: None,
) -> Path:
    """Train a model, or resume the run in `output`, and return the folder of the model.

    Raises ValueError for bad arguments, TrainingError if the run cannot continue, Stopped if it was asked to stop.

    Args:
        overwrite: remove the run in `output` first
        continue_from: folder of a finished run to begin with; the recipe is that of `continuing.further_recipe`
        stopping: requests to stop the run
        on_step: called after every update, on the first rank
        on_refused: called with the reason why a checkpoint is not used
        on_note: called on the first rank with what is no reason to stop: skipped updates, layers whose error is too
            large, lost lines of metrics, other versions than before
    """
    world = world or World(torch.device("cpu"))
    if not world.is_first:
        on_refused = on_note = lambda message: None
    batches, world = _share_work(corpus, recipe, world)
    board_names = [name for name, is_wanted in ((TENSORBOARD, tensorboard), (WANDB, wandb)) if is_wanted]
    for name in board_names:
        check_installed(name)
    evaluation = Evaluation(corpus, recipe, world) if recipe.evaluate_every else None
    documents = [] if batches.mixture is None else batches.mixture.make_probes(world.data_rank, world.data_ranks)
    tokenizer = {name: corpus.read_file(name) for name in corpus.manifest.files}  # the corpus may be gone at the end
    with claimed(output, world, overwrite=overwrite):  # before anything in it is read
        if continue_from is not None:
            begin_with_finished(continue_from, output, recipe, corpus, world)
        recipe = with_full_name(recipe)
        checkpoint, failures = _find_start(output, recipe, corpus, world, on_refused)
        step = 0 if checkpoint is None else checkpoint.step
        initial = read_initial(corpus, recipe) if recipe.initial and checkpoint is None else None
        about = describe_run(recipe, corpus, initial.fingerprint if initial else None, checkpoint, world.device)
        world.all_succeed(True)  # all ranks have read the folder before the first one writes
        if world.is_first:
            _begin_folder(output, checkpoint, failures, recipe, about, world.device, on_note)
        with determinism(recipe, world.device):
            model = make_model(corpus, recipe, initial.tensors if initial else None).to(world.device)
            del initial
            parameters = sum(parameter.numel() for parameter in model.parameters())
            optimiser = make_ready(model, recipe, world)
            state = state_of(checkpoint)
            if checkpoint is not None:
                restore(model, optimiser, checkpoint, skipped=state.skipped)
            metrics = None
            if world.is_first:
                boards = Boards(board_names, output, step, dataclasses.asdict(recipe), on_note)
                metrics = Metrics(output, step, boards=boards, on_broken=on_note)
            saver = Saver(output / CHECKPOINTS, about, recipe, world, metrics, newest=step, on_note=on_note)
            if step < recipe.updates:
                saver.check_room(parameters)
            loop = Loop(
                model,
                optimiser,
                recipe,
                batches,
                world,
                saver,
                Probe(model, recipe, world, documents),
                evaluation,
                stopping or Stopping(),
                state,
                on_note,
            )
            with _lost_ranks_named(saver):
                try:
                    with loop.watchdog, saver, contextlib.closing(loop.steps(step)) as steps:
                        for update in steps:
                            if metrics is not None:
                                metrics.add(update)
                                on_step(update)
                except RuntimeError as error:
                    if world.is_first and not is_of_lost_rank(error) and _may_fail_again(error):
                        note_failure(output, loop.step + 1, str(error))
                    raise
                finally:
                    if metrics is not None:
                        metrics.close()
                return write_model(model, make_config(corpus, recipe), tokenizer, recipe, output, world)


@contextlib.contextmanager
def _lost_ranks_named(saver: Saver) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if is_of_lost_rank(error):
            raise TrainingError(f"another rank is gone; {saver.describe_last_good()}; resume the run") from error
        raise


def _share_work(corpus: Corpus, recipe: Recipe, world: World) -> tuple[Batches, World]:
    """The batches of a run, and the ranks in their mesh; raises ValueError if the ranks cannot share the work."""
    heads = make_config(corpus, recipe).num_attention_heads
    shape = choose_shape(recipe.mesh, ranks=world.ranks, batch=recipe.batch, heads=heads, length=recipe.length)
    batches = make_batches(corpus, recipe, shape.data)
    if recipe.batch // shape.data % recipe.micro_batch:
        raise ValueError(
            f"micro_batch={recipe.micro_batch} does not divide the {recipe.batch // shape.data} sequences of a rank; "
            "choose a number that does, like micro_batch=1"
        )
    return batches, share_sequences(world, shape)


def _find_start(
    output: Path, recipe: Recipe, corpus: Corpus, world: World, on_refused: Callable[[str], None]
) -> tuple[checkpoints.Checkpoint | None, Failures | None]:
    """The checkpoint that a run resumes from, None for a new run, and the failures that made it fall back, if any.

    Collective: every rank must call it.
    """
    failures = read_failures(output) if has_learnt(output) else None
    if failures is not None:
        failures.check_may_resume(output)
        if not failures.calls_for_fallback:
            failures = None
    falls_back = failures is not None
    return find_checkpoint(output, recipe, corpus, on_refused, falls_back=falls_back, world=world), failures


def _begin_folder(
    output: Path,
    checkpoint: checkpoints.Checkpoint | None,
    failures: Failures | None,
    recipe: Recipe,
    about: dict[str, Any],
    device: torch.device,
    on_note: Callable[[str], None],
) -> None:
    """Write `run.json`, and remove what is left of later steps. On the first rank."""
    step = 0 if checkpoint is None else checkpoint.step
    if checkpoint is not None and (changes := describe_changes(checkpoint, about, device)):
        on_note(changes)
    if failures is not None:
        on_note(f"{failures.describe()}; the run goes on from step {step}, once")
        note_fallback(output, failures)
    elif 0 < step < recipe.updates:
        on_note(f"the run in {output} goes on from step {step} of {recipe.updates}")
    if step == 0:
        forget_failures(output)
    write_run(output, about)
    checkpoints.clear_unfinished(output / CHECKPOINTS)
    checkpoints.clear_after(output / CHECKPOINTS, step)


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
        # As options, because the backward pass is compiled later: choosing kernels by their time would change bits.
        options = {"deterministic": True} if recipe.deterministic else None
        for layer in model.model.layers:  # two kinds of layers are two short graphs, for any number of them
            layer.compile(options=options)
    model.share_sequences(world.sequence)
    shard_model(model, model.model.layers, world)
    return make_optimiser(model, recipe)


def _may_fail_again(error: RuntimeError) -> bool:
    """Whether the state of the run may be the cause: not if memory is short, the corpus is gone or the disk is full."""
    if isinstance(error, TrainingError):
        return isinstance(error, StepError)
    return not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error)
