"""Training: a loop whose every step is a function of the recipe, its initial weights, the corpus and the step's number.

    from muse_lab.pretraining.recipes import override, tiny
    from muse_lab.pretraining.training import train

    train(read_corpus(Path("out/corpus")), override(tiny(), ["steps=100"]), Path("out/train"))

Checkpoints have the whole state: a run that was killed at any moment continues from its newest complete checkpoint,
and is bitwise equal to an uninterrupted run.

The folder of a run is that of run_folder.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import NoReturn

import torch
from safetensors.torch import save
from torch import Tensor

from muse_lab.pretraining import checkpoints
from muse_lab.pretraining.autocast import autocast
from muse_lab.pretraining.batches import Batches, Windows
from muse_lab.pretraining.data.corpus import Corpus
from muse_lab.pretraining.determinism import determinism
from muse_lab.pretraining.document_mask import check_packed, separate_documents
from muse_lab.pretraining.initial_model import WEIGHTS, make_config, make_model, read_initial
from muse_lab.pretraining.interruptions.failures import (
    StepError,
    TrainingError,
    forget_failures,
    note_failure,
    note_fallback,
    read_failures,
)
from muse_lab.pretraining.interruptions.stopping import OF_ANOTHER_RANK, Stopped, Stopping
from muse_lab.pretraining.interruptions.watchdog import Watchdog
from muse_lab.pretraining.mesh_shape import choose_shape
from muse_lab.pretraining.model.chunked_loss import IGNORED
from muse_lab.pretraining.model.configuration import DecoderConfig
from muse_lab.pretraining.model.decoder import DecoderForCausalLM
from muse_lab.pretraining.monitoring.boards import TENSORBOARD, WANDB, Boards, check_installed
from muse_lab.pretraining.monitoring.held_out import Evaluation
from muse_lab.pretraining.monitoring.layer_errors import ALL
from muse_lab.pretraining.monitoring.metrics import Metrics, Step
from muse_lab.pretraining.monitoring.probe import Probe, Probing
from muse_lab.pretraining.needles.mixture import NeedleDocuments
from muse_lab.pretraining.optimiser import are_finite, learnt, make_optimiser, restore, set_learning_rate
from muse_lab.pretraining.parallel import (
    World,
    accumulate_gradients,
    is_of_lost_rank,
    local_part,
    shard_model,
    share_sequences,
    whole,
)
from muse_lab.pretraining.prefetch import ReaderError, ReadingError, can_read_ahead, read_ahead, read_batches
from muse_lab.pretraining.recipes import Recipe
from muse_lab.pretraining.run.continuing import begin_with_finished
from muse_lab.pretraining.run.folder import (
    CHECKPOINTS,
    MODEL,
    check_may_start,
    claimed,
    describe_changes,
    describe_last_good,
    describe_run,
    find_checkpoint,
    has_learnt,
    stacks_name,
    state_of,
    with_full_name,
    write_run,
)
from muse_lab.pretraining.run.saving import Saver
from muse_lab.pretraining.run.skipped_updates import after_update, why_skipped
from muse_lab.pretraining.run.state import RunState
from muse_lab.pretraining.schedule import learning_rate
from muse_lab.records.files import errors_naming, new_folder, remove_tree, replace_file, replace_folder


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
    wandb: bool = False,
    stopping: Stopping | None = None,
    on_step: Callable[[Step], None] = lambda step: None,
    on_refused: Callable[[str], None] = lambda message: None,
    on_note: Callable[[str], None] = lambda message: None,
) -> Path:
    """Train a model, and return the folder that it is in.

    Raises ValueError for bad arguments, TrainingError if the run cannot continue, Stopped if it was asked to stop.

    Args:
        resume: continue the run in `output`, or start one if there is none
        overwrite: remove the run in `output` first
        continue_from: folder of a finished run to begin with; the recipe is that of `continuing.further_recipe`
        stopping: who asks the run to stop, if anybody does
        on_step: called after every update, on the first rank
        on_refused: told why a checkpoint is not used
        on_note: told, on the first rank, of what is no reason to stop: updates that are skipped, layers whose error is
            too large, lost lines of metrics, other versions than before
    """
    world = world or World(torch.device("cpu"))
    if not world.is_first:
        on_refused = on_note = _say_nothing
    heads = make_config(corpus, recipe).num_attention_heads
    shape = choose_shape(recipe.mesh, ranks=world.ranks, batch=recipe.batch, heads=heads, length=recipe.length)
    batches = make_batches(corpus, recipe, shape.data)
    if recipe.batch // shape.data % recipe.micro_batch:
        raise ValueError(
            f"micro_batch={recipe.micro_batch} does not divide the {recipe.batch // shape.data} sequences of a rank; "
            "choose a number that does, like micro_batch=1"
        )
    world = share_sequences(world, shape)
    wanted = [name for name, is_wanted in ((TENSORBOARD, tensorboard), (WANDB, wandb)) if is_wanted]
    for name in wanted:
        check_installed(name)
    evaluation = Evaluation(corpus, recipe, world) if recipe.evaluate_every else None
    probed = [] if batches.mixture is None else batches.mixture.make_probes(world.data_rank, world.data_ranks)
    tokenizer = {name: corpus.read_file(name) for name in corpus.manifest.files}  # the corpus may be gone at the end
    with claimed(output, world, overwrite=overwrite):  # before anything is decided by what is in there
        if continue_from is not None:
            begin_with_finished(continue_from, output, recipe, corpus, world)
        recipe = with_full_name(recipe, output, world.device)
        checkpoint = None
        failures = read_failures(output) if resume and has_learnt(output) else None
        falls_back = failures is not None and failures.calls_for_fallback
        if failures is not None:
            failures.check_may_resume(output)
        if resume or continue_from is not None:
            checkpoint = find_checkpoint(output, recipe, corpus, on_refused, falls_back=falls_back, world=world)
        else:
            check_may_start(output)
        step = 0 if checkpoint is None else checkpoint.step
        initial = read_initial(corpus, recipe) if recipe.initial and checkpoint is None else None
        about = describe_run(recipe, corpus, initial.fingerprint if initial else None, checkpoint, world.device)
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
            if failures is not None and falls_back:
                on_note(f"{failures.describe()}; the run goes on from step {step}, once")
                note_fallback(output, failures)
            elif 0 < step < recipe.updates:
                on_note(f"the run in {output} goes on from step {step} of {recipe.updates}")
            if step == 0:
                forget_failures(output)
            write_run(output, about)
            checkpoints.clear_unfinished(folder)
            checkpoints.clear_after(folder, step)
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
                boards = Boards(wanted, output, step, dataclasses.asdict(recipe), on_note)
                metrics = Metrics(output, step, boards=boards, on_broken=on_note)
            saver = Saver(folder, about, recipe, world, metrics, newest=step, on_note=on_note)
            if step < recipe.updates:
                saver.check_room(parameters)
            run = _Run(
                model,
                optimiser,
                recipe,
                batches,
                world,
                saver,
                Probing(model, recipe, world, probed),
                evaluation,
                stopping or Stopping(),
                state,
                on_note,
            )
            try:
                with run.watchdog, saver, contextlib.closing(run.steps(step)) as steps:
                    for done in steps:
                        if metrics is not None:
                            metrics.add(done)
                            on_step(done)
            except RuntimeError as error:
                if is_of_lost_rank(error):
                    raise TrainingError(
                        f"another rank is gone; {saver.describe_last_good()}; resume the run"
                    ) from error
                if world.is_first and _may_fail_again(error):
                    note_failure(output, run.step + 1, str(error))
                raise
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
    model.share_sequences(world.sequence)
    shard_model(model, model.model.layers, world)
    return make_optimiser(model, recipe)


class _StopAsked(Exception):  # noqa: N818 - no error
    """The run is at a safe point, and was asked to stop: nothing of the step that it is in has changed its state."""


@dataclasses.dataclass
class _Run:
    model: DecoderForCausalLM
    optimiser: torch.optim.AdamW
    recipe: Recipe
    batches: Batches
    world: World
    saver: Saver
    probing: Probing
    evaluation: Evaluation | None
    stopping: Stopping
    state: RunState
    on_note: Callable[[str], None]
    step: int = 0
    """updates that are done"""
    is_due: bool = False
    """whether it is time for a checkpoint"""
    watchdog: Watchdog = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        stacks = self.saver.folder.parent / stacks_name(self.world)
        self.watchdog = Watchdog(60 * self.recipe.stall_minutes, stacks, self._end_stalled)

    def steps(self, first: int) -> Generator[Step]:
        """Every update from `first` on, and a checkpoint behind those that are to have one."""
        recipe = self.recipe
        self.probing.apply(self.state.levels)
        with contextlib.closing(self._read(range(first, recipe.updates))) as batches:
            for step in range(first, recipe.updates):
                self.step, self.is_due = step, False
                try:
                    done = self._update(step, batches)
                except _StopAsked:
                    self._stop()
                yield done  # before its checkpoint: a line too many is forgotten when the run goes on
                self.step = done.step
                if done.step % recipe.checkpoint_every == 0 or done.step == recipe.updates:
                    self._save()
                elif self.is_due:
                    self._save(until_next=True)

    def _update(self, step: int, batches: Iterator[Tensor]) -> Step:
        recipe, model = self.recipe, self.model
        self._check_alone()
        began = time.perf_counter()
        self.watchdog.beat(f"reading the batch of step {step + 1}")
        tokens = next(batches)
        attention = recipe.attention_at(step)
        if model.config.attention != attention:
            model.set_attention(attention)
            self.probing.apply(self.state.levels if attention == recipe.attention else {})
        rate = learning_rate(
            step, steps=recipe.steps, warmup=recipe.warmup, peak=recipe.peak_rate, final=recipe.final_rate
        )
        set_learning_rate(self.optimiser, rate)
        self.optimiser.zero_grad()
        loss, (is_asked, self.is_due, has_failed) = self.world.mean_and_flags(
            self._differentiate(tokens),
            self.stopping.request is not None,
            self.saver.is_due(),
            self.saver.has_failed(),
        )
        if has_failed:
            self.saver.fail()
        if is_asked:
            raise _StopAsked
        norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)).item()
        skipped = self._why_skipped(loss, norm)
        seconds = time.perf_counter() - began
        # Of the weights that the loss is of; before the first forward pass of the whole model, FSDP runs no part of it.
        probe, evaluated = self._measure(tokens)
        began = time.perf_counter()
        if skipped is None:
            self.optimiser.step()
        seconds += time.perf_counter() - began
        self.state = after_update(self.state, loss, norm, is_skipped=skipped is not None, sigma=recipe.skip_sigma)
        if probe.changes:
            self._tighten(probe)
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
            answers_loss=probe.answers.get(ALL),
            answers={kind: loss for kind, loss in probe.answers.items() if kind != ALL},
            evaluation=evaluated,
            tightened=self.probing.tightened(self.state.levels) if self.probing.is_due(step) else {},
            skipped=skipped,
        )

    def _why_skipped(self, loss: float, norm: float) -> str | None:
        """None for an update that is made. All ranks have the same loss and norm, and decide the same."""
        recipe, number = self.recipe, self.step + 1
        reason = why_skipped(loss, norm, self.state, recipe.skip_sigma)
        if reason is None:
            return None
        is_broken = False
        if not (math.isfinite(loss) and math.isfinite(norm)):
            weights = (local_part(parameter) for parameter in self.model.parameters())
            is_broken = not self.world.all_succeed(are_finite(weights))
        if is_broken or self.state.skipped >= recipe.skip_budget:
            no_more = f"; skip_budget={recipe.skip_budget} allows no more updates to be skipped"
            why_not = ", and the weights are not finite" if is_broken else no_more
            raise StepError(
                f"step {number} failed: {reason}{why_not}; {self.saver.describe_last_good()}; start again from "
                f"its recipe with a lower peak_rate{'' if is_broken else ', or resume with a larger skip_budget'}"
            )
        self.on_note(
            f"step {number} is skipped: {reason}; {self.state.skipped + 1} of skip_budget={recipe.skip_budget}"
        )
        return reason

    def _measure(self, tokens: Tensor) -> tuple[Probe, dict[str, float]]:
        """The probe and the evaluation that are due, of the weights before the update."""
        recipe, number = self.recipe, self.step + 1
        probe, evaluated = Probe(self.state.levels), {}
        if self.probing.is_due(self.step):
            self.watchdog.beat(f"probing at step {number}")
            probe = self.probing.run(tokens, self.state.levels, self._check_together)
        if self.evaluation is not None and number % recipe.evaluate_every == 0:
            self.watchdog.beat(f"evaluating at step {number}")
            with autocast(recipe, self.world.device), torch.compiler.set_stance("force_eager"):
                evaluated = self.evaluation.run(self.model, self._check_together)
        self.watchdog.beat(f"changing the weights at step {number}")
        return probe, evaluated

    def _tighten(self, probe: Probe) -> None:
        """Or relax: the attention of layers, from the next update on."""
        for change in probe.changes:
            self.on_note(f"step {self.step + 1}: {change.describe(self.recipe.error_limit)}")
        self.state = dataclasses.replace(self.state, levels=probe.levels)
        self.probing.apply(probe.levels)

    def _check_alone(self) -> None:
        """Stop here if this is the only process, and was asked to; several have to agree first."""
        self.watchdog.check()
        if self.world.ranks == 1 and self.stopping.request is not None:
            raise _StopAsked

    def _check_together(self) -> None:
        """Stop here if any rank was asked to. Collective: every rank must call it."""
        self.watchdog.beat(f"measuring at step {self.step + 1}")
        if self.world.any(self.stopping.request is not None):
            raise _StopAsked

    def _stop(self) -> NoReturn:
        if self.step > self.saver.newest:
            self._save(until_next=True)
        self.watchdog.beat(f"writing the checkpoint of step {self.saver.newest}")
        self.saver.wait()
        cause, exit_code = self.stopping.request or OF_ANOTHER_RANK
        raise Stopped(f"{cause} after step {self.step}", exit_code)

    def _save(self, *, until_next: bool = False) -> None:
        if self.step > self.state.skipped:  # before the first update there is nothing to keep
            self.watchdog.beat(f"saving step {self.step}")
            self.saver.save(self.step, learnt(self.model, self.optimiser), self.state, until_next=until_next)

    def _end_stalled(self, message: str) -> None:
        """In the watchdog's thread, before it ends the process."""
        if self.world.is_first:
            note_failure(self.saver.folder.parent, self.step + 1, message)
        self.on_note(f"{message}; {describe_last_good(self.saver.folder)}; resume the run")

    def _differentiate(self, tokens: Tensor) -> Tensor:
        """The mean loss of this rank's tokens, and its gradients, which ranks average.

        Of a sequence that ranks share, each has the whole, and the model computes this rank's part of it.
        """
        total = torch.zeros((), device=self.world.device)
        parts = tokens.split(self.recipe.micro_batch)
        counted: Tensor | float = tokens[:, 1:].numel()
        end = self.batches.windows.corpus.manifest.end
        if self.recipe.document_mask:  # ranks may count different numbers of targets
            targets = (separate_documents(tokens, end).shift_labels != IGNORED).sum()
            counted = self.world.mean(targets.float()).clamp(min=1)
        counted = counted / self.world.sequence_ranks
        for number, part in enumerate(parts):
            accumulate_gradients(self.model, is_last=number == len(parts) - 1)
            ids, labels, positions = part[:, :-1], part[:, 1:].contiguous(), None
            if self.recipe.document_mask:
                ids, positions, labels = separate_documents(part, end)
            self.watchdog.beat(f"computing step {self.step + 1}")
            with autocast(self.recipe, self.world.device):
                loss = self.model(
                    ids, position_ids=positions, shift_labels=labels, num_items_in_batch=counted, use_cache=False
                ).loss
            loss.backward()
            total += loss.detach()
        return total

    def _read(self, steps: range) -> Generator[Tensor]:
        """Windows are read at once, but needle documents take time to write."""
        if can_read_ahead() and self.batches.mixture is not None:
            read = read_ahead(self.batches, steps, self.world.data_rank, self._check_alone)
        else:
            read = read_batches(self.batches, steps, self.world.data_rank)
        try:
            with contextlib.closing(read) as batches:
                for tokens in batches:
                    yield tokens.to(self.world.device)
        except ReaderError as error:
            raise TrainingError(f"{error}; {self.saver.describe_last_good()}; resume the run") from None
        except ReadingError as error:
            raise TrainingError(
                f"the corpus in {self.batches.windows.corpus.folder} cannot be read any more ({error}); "
                f"{self.saver.describe_last_good()}; run muse prepare again as before, then resume the run"
            ) from None


def _may_fail_again(error: RuntimeError) -> bool:
    """Whether the state of the run may be why: not where memory is short, the corpus is gone, or the disk is full."""
    if isinstance(error, TrainingError):
        return isinstance(error, StepError)
    return not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error)


def _say_nothing(message: str) -> None:
    pass


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
                new_folder(unfinished)
                config.save_pretrained(unfinished)
                replace_file(unfinished / WEIGHTS, save(weights, metadata={"format": "pt"}))
                for name, content in tokenizer.items():
                    (unfinished / name).write_bytes(content)
                replace_folder(unfinished, folder)
        finally:
            remove_tree(unfinished)  # it may be what fills the disk
    return folder
