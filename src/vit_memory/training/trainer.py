"""The training loop: steps, evaluations, early stopping and checkpoints. The same for every regime."""

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vit_memory.backbone import Backbone
from vit_memory.data.loading import nothing_usable
from vit_memory.errors import TrainingError, TrainingStopped
from vit_memory.parallel import ChunkThreads
from vit_memory.training.batches import BatchSource, Chunk, Loaders
from vit_memory.training.callbacks import Callbacks, Progress
from vit_memory.training.checkpoint import CheckpointFile, TrainingState
from vit_memory.training.ranks import Ranks
from vit_memory.training.recipe import Recipe
from vit_memory.training.sweep import Sweep

log = logging.getLogger(__name__)


class Trainer:
    """Takes a sweep from its state to the last step. `state` is up to date after every call."""

    def __init__(
        self,
        backbone: Backbone,
        sweep: Sweep,
        recipe: Recipe,
        source: BatchSource,
        loaders: Sequence[Loaders],
        ranks: Ranks,
        state: TrainingState,
    ) -> None:
        self.device, self.sweep, self.recipe, self.source = backbone.device, sweep, recipe, source
        self.loaders, self.ranks, self.state = loaders, ranks, state
        self.threads = ChunkThreads(backbone.device, state.threads)
        images = max(len(one.train.split) for one in loaders)
        # Every epoch has its own order, so only twice its steps are certain to contain one whole epoch.
        self._max_empty_steps = 2 * math.ceil(images / min(recipe.batch, images))
        self._empty_steps = 0

    def run(self, callbacks: Callbacks, checkpoint: CheckpointFile | None, checkpoint_every: int) -> None:
        """Train until the last step, or until no setting has improved for as long as the recipe's patience."""
        if self.finished():  # resumed, but nothing is left to do
            return
        with self.threads:
            self._prepare(callbacks)
            for chunks in self.source.training_batches(self.state.step, self.threads.threads):
                self.step(chunks)
                self._report(callbacks)
                if self.finished() or self.state.step % checkpoint_every == 0:
                    self._save(checkpoint)
                if self.finished():
                    break
                if self.ranks.any(callbacks.should_stop()):
                    self._save(checkpoint)
                    raise TrainingStopped(f"stopped after step {self.state.step} of {self.recipe.steps}.")

    def finished(self) -> bool:
        """Whether the last step is done or patience has run out."""
        return self.state.step == self.recipe.steps or self.out_of_patience

    @property
    def out_of_patience(self) -> bool:
        """Whether no setting has improved for as many evaluations as the recipe allows."""
        return self.recipe.patience is not None and self.state.stale_evaluations >= self.recipe.patience

    def _prepare(self, callbacks: Callbacks) -> None:
        for loaders in self.loaders:
            loaders.train.check_usable("training image")
            loaders.validation.check_usable("validation image")
        with self.ranks.fail_together() as check_other_processes:

            def check_stop() -> None:
                check_other_processes()
                if callbacks.should_stop():
                    raise TrainingStopped("stopped before the first step; views that are stored on disk stay there.")

            def on_progress(views: int, total: int) -> None:
                callbacks.on_progress(Progress(views, total, stage="storing"))

            self.source.prepare(on_progress, check_stop, self.threads)

    def _report(self, callbacks: Callbacks) -> None:
        """Evaluate if it is time to, and report the step."""
        state, recipe = self.state, self.recipe
        due = state.step == recipe.steps or state.step % recipe.evaluate_every == 0
        scores = self.evaluate() if due else None
        losses = tuple((state.loss_sums / max(1, state.loss_steps)).tolist())
        callbacks.on_progress(Progress(state.step, recipe.steps, losses, scores, self.sweep.objective.metric))
        if due:
            state.loss_sums, state.loss_steps = torch.zeros(len(self.sweep.settings)), 0

    def _save(self, checkpoint: CheckpointFile | None) -> None:
        if checkpoint is not None and self.ranks.is_main:
            checkpoint.write(self.sweep, self.state)

    def step(self, chunks: Sequence[Chunk]) -> None:
        """One optimiser step on a batch, summed over all processes."""
        sweep, state = self.sweep, self.state
        losses, count = torch.zeros(len(sweep.settings), device=self.device), torch.zeros(1, device=self.device)
        sweep.leaves()  # created here, once, before the threads read them
        for some in self.threads.rounds(chunks):
            for loss, gradients in self.threads.map(self._backward, some):
                losses += loss
                sweep.accumulate(gradients)
        count += sum(len(chunk.indices) for chunk in chunks)
        self.ranks.all_reduce([*sweep.gradients(), losses, count])
        state.step += 1
        self._empty_steps = 0 if count else self._empty_steps + 1
        if self._empty_steps >= self._max_empty_steps:  # images were usable at the start: files were removed since
            raise nothing_usable("training image", self.loaders[0].train.bad.first)
        if not count:  # all images of the batch are bad
            return
        losses /= count
        diverged = sweep.step(state.step - 1, losses, float(count))
        state.loss_sums, state.loss_steps = state.loss_sums + losses.cpu(), state.loss_steps + 1
        self._report_stopped(diverged)

    def _report_stopped(self, diverged: Sequence[int]) -> None:
        """Name the settings that were just stopped. Raises TrainingError if none is left."""
        sweep, state = self.sweep, self.state
        for i in diverged:
            log.warning("%s diverged at step %d and was stopped", sweep.settings[i].name, state.step)
            state.stopped[i] = state.step
        if not bool(sweep.alive.any()):
            names = ", ".join(setting.name for setting in sweep.settings)
            raise TrainingError(
                f"every setting diverged, the last at step {state.step}: {names}. Try smaller learning rates."
            )

    def _backward(self, chunk: Chunk) -> tuple[Tensor, list[Tensor | None]]:
        return self.sweep.backward(chunk.encode(), chunk.targets.to(self.device))

    @torch.no_grad()
    def evaluate(self) -> tuple[float, ...]:
        """Score every setting on the validation images, NaN for stopped ones; keep best weights and thresholds."""
        sweep, state, objective = self.sweep, self.state, self.sweep.objective
        sums, finite = self._validation_sums()
        diverged = (sweep.alive & ~finite).nonzero().flatten().tolist()
        sweep.alive &= finite  # NaN is no answer: it would count as the first class
        self._report_stopped(diverged)
        scores = torch.where(sweep.alive, objective.scores(sums).to(self.device), math.nan).tolist()
        best = state.best_scores
        improved = [new > (-math.inf if old is None else old) for new, old in zip(scores, best, strict=True)]
        state.stale_evaluations = 0 if any(improved) else state.stale_evaluations + 1
        state.best_scores = [new if better else old for new, old, better in zip(scores, best, improved, strict=True)]
        if self.recipe.keeps_best:
            sweep.keep_best(torch.tensor(improved))
        state.thresholds = self._of_final_weights(objective.thresholds(sums), state.thresholds, improved)
        state.part_scores = self._of_final_weights(objective.part_scores(sums), state.part_scores, improved)
        state.scores = [None if math.isnan(score) else score for score in scores]
        return tuple(scores)

    def _validation_sums(self) -> tuple[list[Tensor], Tensor]:
        """The sums that scores are computed from, and of which settings all outputs are finite (T,)."""
        sweep, objective = self.sweep, self.sweep.objective
        sums, count = objective.start(len(sweep.settings), self.device), torch.zeros(1, device=self.device)
        broken = torch.zeros(len(sweep.settings), device=self.device)
        sweep.leaves()
        for chunks in self.source.validation_batches(self.threads.threads):
            for some in self.threads.rounds(chunks):
                outputs = self.threads.map(lambda chunk: sweep.logits(chunk.encode()), some)
                for chunk, logits in zip(some, outputs, strict=True):
                    objective.add(sums, logits, chunk.targets.to(self.device), chunk.indices.to(self.device))
                    broken += (~logits.isfinite()).flatten(1).any(1)
                    count += len(chunk.indices)
        self.ranks.all_reduce([*sums, broken, count])
        if not count:
            raise nothing_usable("validation image", self.loaders[0].validation.bad.first)
        return sums, broken == 0

    def _of_final_weights(
        self, new: list[list[float]] | None, old: list[list[float]] | None, improved: Sequence[bool]
    ) -> list[list[float]] | None:
        """Of every setting, the values that belong to the weights that it will end with."""
        if new is None or old is None or not self.recipe.keeps_best:
            return new
        return [new[i] if better else old[i] for i, better in enumerate(improved)]
