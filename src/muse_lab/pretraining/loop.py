"""The updates of a run in order, from a given step on, and the checkpoints after them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Generator, Iterator
from typing import NoReturn

import torch
from torch import Tensor

from muse_lab.pretraining.batches import Batches
from muse_lab.pretraining.determinism import autocast
from muse_lab.pretraining.document_mask import separate_documents
from muse_lab.pretraining.interruptions.failures import StepError, TrainingError, note_failure
from muse_lab.pretraining.interruptions.stopping import OF_ANOTHER_RANK, Stopped, Stopping
from muse_lab.pretraining.interruptions.watchdog import Watchdog
from muse_lab.pretraining.model.chunked_loss import IGNORED
from muse_lab.pretraining.model.decoder import DecoderForCausalLM
from muse_lab.pretraining.monitoring.answer_losses import ALL
from muse_lab.pretraining.monitoring.error_limit import Probed
from muse_lab.pretraining.monitoring.held_out import Evaluation
from muse_lab.pretraining.monitoring.metrics import Step
from muse_lab.pretraining.monitoring.probe import Probe
from muse_lab.pretraining.optimiser import are_finite, learned_tensors
from muse_lab.pretraining.parallel import World, accumulate_gradients, full_tensor, local_part
from muse_lab.pretraining.prefetch import ReaderError, ReadingError, can_read_ahead, read_ahead, read_batches
from muse_lab.pretraining.recipes import Recipe
from muse_lab.pretraining.run.folder import describe_last_good, stacks_name
from muse_lab.pretraining.run.saving import Saver
from muse_lab.pretraining.run.state import RunState, after_update, why_skipped
from muse_lab.pretraining.schedule import learning_rate


@dataclasses.dataclass
class Loop:
    model: DecoderForCausalLM
    optimiser: torch.optim.AdamW
    recipe: Recipe
    batches: Batches
    world: World
    saver: Saver
    probe: Probe
    evaluation: Evaluation | None
    stopping: Stopping
    state: RunState
    on_note: Callable[[str], None]
    step: int = 0
    """finished updates"""
    is_due: bool = False
    """whether it is time for a checkpoint"""
    watchdog: Watchdog = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        stacks = self.saver.folder.parent / stacks_name(self.world)
        self.watchdog = Watchdog(60 * self.recipe.stall_minutes, stacks, self._end_stalled)

    def steps(self, first: int) -> Generator[Step]:
        """Make every update from `first` on, and the checkpoints that are due."""
        recipe = self.recipe
        self.probe.apply(self.state.levels)
        with contextlib.closing(self._read(range(first, recipe.updates))) as batches:
            for step in range(first, recipe.updates):
                self.step, self.is_due = step, False
                try:
                    update = self._update(step, batches)
                except _StopAsked:
                    self._stop()
                yield update  # before its checkpoint: a line too many is dropped when the run resumes
                self.step = update.step
                if update.step % recipe.checkpoint_every == 0 or update.step == recipe.updates:
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
            self.probe.apply(self.state.levels if attention == recipe.attention else {})
        rate = learning_rate(
            step, steps=recipe.steps, warmup=recipe.warmup, peak=recipe.peak_rate, final=recipe.final_rate
        )
        for group in self.optimiser.param_groups:
            group["lr"] = rate
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
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)).item()
        skipped = self._why_skipped(loss, norm)
        seconds = time.perf_counter() - began
        # With the weights of the loss, and after its forward pass: before the first one, FSDP runs no part of a model.
        probed, evaluated = self._measure(tokens)
        began = time.perf_counter()
        if skipped is None:
            self.optimiser.step()
        seconds += time.perf_counter() - began
        self.state = after_update(self.state, loss, norm, is_skipped=skipped is not None, sigma=recipe.skip_sigma)
        if probed.changes:
            self._tighten(probed)
        return Step(
            step=step + 1,
            loss=loss,
            learning_rate=rate,
            gradient_norm=norm,
            attention=attention,
            tokens=(step + 1) * recipe.tokens_per_step,
            tokens_per_second=round(recipe.tokens_per_step / seconds, 3),
            rse=probed.errors,
            attention_means=probed.means,
            answers_loss=probed.answers.get(ALL),
            answers={kind: loss for kind, loss in probed.answers.items() if kind != ALL},
            evaluation=evaluated,
            tightened=self.probe.tightened(self.state.levels) if self.probe.is_due(step) else {},
            skipped=skipped,
        )

    def _differentiate(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of this rank's (sequences, length + 1) tokens; ranks average its gradients.

        Ranks that share a sequence all have it whole, and the model computes this rank's part.
        """
        recipe, world, end = self.recipe, self.world, self.batches.windows.corpus.manifest.end
        total = torch.zeros((), device=world.device)
        parts = tokens.split(recipe.micro_batch)
        counted: Tensor | float = tokens[:, 1:].numel()
        if recipe.document_mask:  # ranks may count different numbers of targets
            targets = (separate_documents(tokens, end).shift_labels != IGNORED).sum()
            counted = world.mean(targets.float()).clamp(min=1)
        counted = counted / world.sequence_ranks
        for number, part in enumerate(parts):
            accumulate_gradients(self.model, is_last=number == len(parts) - 1)
            ids, labels, positions = part[:, :-1], part[:, 1:].contiguous(), None
            if recipe.document_mask:
                ids, positions, labels = separate_documents(part, end)
            self.watchdog.beat(f"computing step {self.step + 1}")
            with autocast(recipe, world.device):
                loss = self.model(
                    ids, position_ids=positions, shift_labels=labels, num_items_in_batch=counted, use_cache=False
                ).loss
            loss.backward()
            total += loss.detach()
        return total

    def _why_skipped(self, loss: float, norm: float) -> str | None:
        """Why this update is skipped, or None. All ranks have the same loss and norm, and decide the same."""
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

    def _measure(self, tokens: Tensor) -> tuple[Probed, dict[str, float]]:
        """Run the probe and the evaluation if they are due, on the weights before the update."""
        recipe, number = self.recipe, self.step + 1
        probed, evaluated = Probed({}, self.state.levels, []), {}
        if self.probe.is_due(self.step):
            self.watchdog.beat(f"probing at step {number}")
            probed = self.probe.run(tokens, self.state.levels, self._check_together)
        if self.evaluation is not None and number % recipe.evaluate_every == 0:
            self.watchdog.beat(f"evaluating at step {number}")
            with autocast(recipe, self.world.device), torch.compiler.set_stance("force_eager"):
                evaluated = self.evaluation.run(self.model, self._check_together)
        self.watchdog.beat(f"changing the weights at step {number}")
        return probed, evaluated

    def _tighten(self, probed: Probed) -> None:
        """Tighten or relax the attention of layers from the next update on."""
        for change in probed.changes:
            self.on_note(f"step {self.step + 1}: {change.describe(self.recipe.error_limit)}")
        self.state = dataclasses.replace(self.state, levels=probed.levels)
        self.probe.apply(probed.levels)

    def _check_alone(self) -> None:
        """Stop here if the run was asked to and has one process; several processes have to agree first."""
        self.watchdog.check()
        if self.world.ranks == 1 and self.stopping.request is not None:
            raise _StopAsked

    def _check_together(self) -> None:
        """Stop here if any rank was asked to stop. Collective: every rank must call it."""
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
            self.saver.save(self.step, learned_tensors(self.model, self.optimiser), self.state, until_next=until_next)

    def _end_stalled(self, message: str) -> None:
        """Called in the watchdog's thread before it ends the process."""
        if self.world.is_first:
            note_failure(self.saver.folder.parent, self.step + 1, message)
        self.on_note(f"{message}; {describe_last_good(self.saver.folder)}; resume the run")

    def _read(self, steps: range) -> Generator[Tensor]:
        """The batches of `steps`, read ahead if they have needle documents, which take time to write."""
        if can_read_ahead() and self.batches.mixture is not None:
            reader = read_ahead(self.batches, steps, self.world.data_rank, self._check_alone)
        else:
            reader = read_batches(self.batches, steps, self.world.data_rank)
        try:
            with contextlib.closing(reader) as batches:
                for tokens in batches:
                    yield tokens.to(self.world.device)
        except ReaderError as error:
            raise TrainingError(f"{error}; {self.saver.describe_last_good()}; resume the run") from None
        except ReadingError as error:
            raise TrainingError(
                f"the corpus in {self.batches.windows.corpus.folder} cannot be read any more ({error}); "
                f"{self.saver.describe_last_good()}; run muse prepare again as before, then resume the run"
            ) from None


class _StopAsked(Exception):  # noqa: N818 - no error
    """The run was asked to stop and is at a safe point: the current step has not changed its state yet."""
