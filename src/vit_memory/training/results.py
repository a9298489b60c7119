"""What a training returns: every setting with its trained task and validation score."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vit_memory.backbone import Backbone
from vit_memory.branch import Branch
from vit_memory.choices import Storage
from vit_memory.data.loading import BadImages
from vit_memory.preprocessing import Preprocessing
from vit_memory.task import Task, TaskRecord
from vit_memory.training.checkpoint import TrainingState
from vit_memory.training.domain import DomainObjective, DomainSweep
from vit_memory.training.recipe import Recipe
from vit_memory.training.regimes import FullSweep
from vit_memory.training.sweep import Setting, Sweep


@dataclass(frozen=True, slots=True, eq=False)
class SettingResult:
    """The result of one setting."""

    setting: Setting
    task: Task  # trained; untrained if the setting diverged
    score: float | None  # on the validation images; None if it diverged
    stopped_at: int | None = None  # the step at which it diverged
    backbone: Backbone | None = None  # regime `full` only: the trained backbone
    branch: Branch | None = None  # the branch that was trained with the task
    other_tasks: tuple[Task, ...] = ()  # `fit_branch`: those of the further datasets; untrained if it diverged

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The task, or with `fit_branch` one for every dataset."""
        return (self.task, *self.other_tasks)

    @property
    def method(self) -> str:
        """What it learned besides a head, for tables."""
        return self.setting.method

    @property
    def parameters(self) -> int:
        """How many parameters were trained: of all its tasks, and of a branch or backbone trained with them."""
        weights = () if self.backbone is None else self.backbone.model.parameters()
        others = sum(task.parameters for task in self.other_tasks) + sum(weight.numel() for weight in weights)
        return self.setting.parameters + others


@dataclass(frozen=True, slots=True, eq=False)
class FitResult:
    """Every setting with its validation score, and the best of them."""

    settings: tuple[SettingResult, ...]
    metric: str = "accuracy"  # the name of the scores: accuracy, balanced accuracy, mAP or R²
    storage: Storage = "off"  # where the trunks were
    bad_images: BadImages = field(default_factory=BadImages)  # images that were left out, with the reason

    @property
    def best(self) -> SettingResult:
        """The highest validation score; of equals the one with the fewest parameters, then the first."""
        scored = [result for result in self.settings if result.score is not None]
        return max(scored, key=lambda result: (result.score or 0.0, -result.parameters))

    @property
    def best_by_method(self) -> list[SettingResult]:
        """The best setting of every method that did not diverge, from the smallest task to the largest."""
        best: dict[str, SettingResult] = {}
        for result in self.settings:
            method = result.method
            if result.score is not None and (method not in best or result.score > (best[method].score or 0.0)):
                best[method] = result
        return sorted(best.values(), key=lambda result: result.parameters)


def metric_key(metric: str) -> str:
    """The name of a validation score in files: validation_accuracy, validation_balanced_accuracy, _map or _r2."""
    return "validation_" + metric.lower().replace(" ", "_").replace("²", "2")


def setting_results(
    sweep: Sweep, state: TrainingState, recipe: Recipe, preprocessing: Preprocessing
) -> tuple[SettingResult, ...]:
    """The results of a finished training, in the order of the settings."""
    objective = sweep.objective
    scores = state.best_scores if recipe.keeps_best else state.scores
    results = []
    branches = sweep.branches()
    for i, (setting, task) in enumerate(zip(sweep.settings, sweep.tasks(), strict=True)):
        score = scores[i]
        if i in state.stopped or score is None:
            results.append(SettingResult(setting, setting.task, None, state.stopped.get(i)))
            continue
        backbone = sweep.trained_backbone(i) if isinstance(sweep, FullSweep) else None
        thresholds = None if state.thresholds is None else tuple(state.thresholds[i])
        metrics = {metric_key(objective.metric): score}
        record = _training_record(task.record, setting, recipe, preprocessing, metrics)
        complete = replace(task, record=record, thresholds=thresholds, target_scale=objective.scale)
        branch = branches[i]
        if branch is not None:
            record = _training_record(branch.record, setting, recipe, preprocessing, metrics)
            branch = replace(branch, record=record)
        results.append(SettingResult(setting, complete, score, backbone=backbone, branch=branch))
    return tuple(results)


def domain_results(
    sweep: DomainSweep, state: TrainingState, recipe: Recipe, preprocessing: Preprocessing
) -> tuple[SettingResult, ...]:
    """The results of a training on several datasets, in the order of the settings."""
    objective = sweep.objective
    assert isinstance(objective, DomainObjective)
    scores = state.best_scores if recipe.keeps_best else state.scores
    results = []
    branches = sweep.branches()
    tasks_by_dataset = [part.tasks() for part in sweep.parts]
    for i, setting in enumerate(sweep.settings):
        score, branch = scores[i], branches[i]
        if i in state.stopped or score is None or branch is None or state.part_scores is None:
            untrained = tuple(part.settings[i].task for part in sweep.parts[1:])
            results.append(SettingResult(setting, setting.task, None, state.stopped.get(i), other_tasks=untrained))
            continue
        thresholds = list(state.thresholds[i]) if state.thresholds is not None else []
        tasks: list[Task] = []
        metrics: dict[str, float] = {metric_key(objective.metric): score}
        for d, part in enumerate(objective.parts):
            task, own_score = tasks_by_dataset[d][i], state.part_scores[i][d]
            metrics[f"{task.name} {metric_key(part.metric)}"] = own_score
            own_metrics = {metric_key(part.metric): own_score}
            record = _training_record(task.record, setting, recipe, preprocessing, own_metrics)
            count = len(task.labels) if task.kind == "multi-label" else 0
            own, thresholds = thresholds[:count], thresholds[count:]
            tasks.append(replace(task, record=record, thresholds=tuple(own) or None, target_scale=part.scale))
        record = _training_record(branch.record, setting, recipe, preprocessing, metrics)
        results.append(
            SettingResult(setting, tasks[0], score, branch=replace(branch, record=record), other_tasks=tuple(tasks[1:]))
        )
    return tuple(results)


def _training_record(
    record: TaskRecord, setting: Setting, recipe: Recipe, preprocessing: Preprocessing, metrics: Mapping[str, float]
) -> TaskRecord:
    """The record of a trained task or branch, for its file."""
    recipe_record = {
        **record.recipe,
        **recipe.record(),
        "learning_rates": [setting.learning_rate],
        "weight_decays": [setting.weight_decay],
        "area": list(recipe.area),
    }
    return replace(record, preprocessing=preprocessing, recipe=recipe_record, metrics=metrics)
