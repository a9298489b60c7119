"""fit: train tasks on images, all their settings at once, live or from stored trunks."""

from collections.abc import Sequence
from itertools import product

import torch

from vit_memory.backbone import Backbone
from vit_memory.branch import Branch
from vit_memory.data.loading import BadImages, Loader
from vit_memory.data.splits import Split, why_empty
from vit_memory.data.transforms import EvalTransform, TrainTransform, view_size
from vit_memory.errors import TrainingError
from vit_memory.graph import TaskGraph, has_digest
from vit_memory.model import check_trained_on
from vit_memory.preprocessing import Preprocessing
from vit_memory.task import Task
from vit_memory.training.batches import LOADER_BATCH, Loaders, batch_source
from vit_memory.training.branch_sweep import BranchSweep, check_extends_nothing
from vit_memory.training.callbacks import Callbacks
from vit_memory.training.checkpoint import CheckpointFile, TrainingState, training_key
from vit_memory.training.objective import objective_for
from vit_memory.training.options import TrainingOptions
from vit_memory.training.recipe import Recipe
from vit_memory.training.regimes import build_sweep
from vit_memory.training.results import FitResult, setting_results
from vit_memory.training.sweep import Setting, Sweep
from vit_memory.training.trainer import Trainer
from vit_memory.training.trunk_shape import TrunkShape


def fit(
    backbone: Backbone,
    tasks: Sequence[Task],
    train: Split,
    validation: Split,
    recipe: Recipe | None = None,
    *,
    parents: Sequence[Task] = (),
    branches: Sequence[Branch] = (),
    train_branches: bool = False,
    options: TrainingOptions | None = None,
    callbacks: Callbacks | None = None,
) -> FitResult:
    """Train every task with every learning rate and weight decay of the recipe, all at once; the best is `.best`.

    >>> backbone, data = load_backbone("bundled"), open_data("digits")
    >>> tasks = [new_task(backbone, "digits", data.labels, cells=cells) for cells in (1, 5)]
    >>> recipe = Recipe(steps=2, learning_rates=(0.1, 0.3), evaluate_every=2)
    >>> result = fit(backbone, tasks, data.train.per_class(2, seed=0), data.validation.per_class(2, seed=0), recipe)
    >>> [setting.setting.name for setting in result.settings]
    ['1 cell, rate 0.1', '1 cell, rate 0.3', '5 cells, rate 0.1', '5 cells, rate 0.3']
    >>> result.best.task.name
    'digits'

    `tasks` come from `new_task`: the same labels, any memory sizes, starts and seeds; any of the composable regimes, or
    all of one other regime. `parents` are the tasks they extend, with all ancestors. The backbone and the parents are
    not changed. The same arguments give the same bits on the same machine; every setting ends with the weights of its
    solo run, to rounding.

    `branches` are those that tasks and parents stand on. They are not changed, unless `train_branches`: then every
    setting trains a copy of its task's branch too, which is `.best.branch`.

    `recipe` decides what is learned; without one it is `Recipe()`, or `Recipe.reader()` if a task has a learned reader
    or a branch is trained.
    `options` decides how the training runs: `TrainingOptions(cache=Cache("disk"), workers=4)`; with a `checkpoint` file
    and `resume=True`, an interrupted training ends with the same weights as an uninterrupted one. `callbacks` report
    progress and can stop the training, which saves the checkpoint and raises TrainingStopped.

    Loss and validation score depend on the kind of the tasks: cross-entropy and accuracy; binary cross-entropy and mAP,
    with thresholds chosen on the validation images; or smooth L1 and R².
    """
    recipe = recipe or Recipe.for_regimes((task.regime for task in tasks), train_branches=train_branches)
    check_trainable(backbone, tasks, [*parents, *branches], train, validation)
    if train_branches:
        check_extends_nothing(tasks[0].name, [parent.name for parent in parents])
    objective = objective_for(tasks[0], recipe, train, validation)
    grid = product(tasks, recipe.rates, recipe.weight_decays)
    trainable = branches if train_branches else ()
    settings = [Setting(task, rate, decay, _branch_of(task, trainable)) for task, rate, decay in grid]
    frozen = TaskGraph(parents, () if train_branches else branches)
    sweep = build_sweep(backbone, settings, frozen, recipe, objective)
    return train_sweep(sweep, train, validation, options or TrainingOptions(), callbacks or Callbacks())


def train_sweep(
    sweep: Sweep, train: Split, validation: Split, options: TrainingOptions, callbacks: Callbacks
) -> FitResult:
    """Train the settings of a sweep with its recipe: live or from a store, from the start or from a checkpoint."""
    backbone, recipe, objective, ranks = sweep.backbone, sweep.recipe, sweep.objective, options.ranks
    preprocessing = training_preprocessing(backbone, options.image_size)
    if isinstance(sweep, BranchSweep):
        threads = options.threads or torch.get_num_threads()
        with ranks.fail_together():
            sweep.check_memory(TrunkShape.of(backbone, view_size(preprocessing)), threads * ranks.local_world_size)
    loaders = build_loaders(train, validation, preprocessing, recipe, options)
    source = batch_source(backbone, sweep, recipe, loaders, options.cache, ranks, callbacks.on_storage)

    state = TrainingState.new(len(sweep.settings), options.threads or torch.get_num_threads())
    checkpoint = None
    if options.checkpoint_path is not None:
        key = training_key(backbone, recipe, sweep, (train, validation), preprocessing, source.precision)
        checkpoint = CheckpointFile(options.checkpoint_path, key)
        if options.resume and checkpoint.path.exists():
            state = checkpoint.read(sweep)

    trainer = Trainer(backbone, sweep, recipe, source, [loaders], ranks, state)
    trainer.run(callbacks, checkpoint, options.checkpoint_every)
    results = setting_results(sweep, state, recipe, preprocessing)
    return FitResult(results, objective.metric, source.storage, loaders.train.bad)


def training_preprocessing(backbone: Backbone, image_size: int | None) -> Preprocessing:
    """How images are prepared, at another size if one is given."""
    preprocessing = backbone.preprocessing
    if preprocessing is None:
        raise TrainingError(
            f"{backbone.name} does not say how its images are prepared. Pass it: load_backbone(…, preprocessing=…)."
        )
    return preprocessing if image_size is None else preprocessing.at(image_size)


def _branch_of(task: Task, trainable: Sequence[Branch]) -> Branch | None:
    """The branch that is trained with a task, if branches are trained."""
    if task.branch is None:
        return None
    return next((branch for branch in trainable if has_digest(branch, task.branch.digest)), None)


def check_trainable(
    backbone: Backbone,
    tasks: Sequence[Task],
    frozen: Sequence[Task | Branch],
    train: Split,
    validation: Split,
) -> None:
    """Raise for arguments that cannot be trained, before any work."""
    if not tasks:
        raise TrainingError("no tasks to train.")
    for item in (*tasks, *frozen):
        check_trained_on(item, backbone)
    for name, split in (("training", train), ("validation", validation)):
        if not len(split):
            raise TrainingError(f"the {name} split holds no images: {why_empty(split.kind)}.")


def build_loaders(
    train: Split, validation: Split, preprocessing: Preprocessing, recipe: Recipe, options: TrainingOptions
) -> Loaders:
    """Both collect bad images in the same list."""
    augmented = TrainTransform(preprocessing, augment=recipe.augment, flip=recipe.flip, area=recipe.area)
    bad = BadImages()
    workers, on_bad_image = options.workers, options.on_bad_image
    return Loaders(
        Loader(train, augmented, LOADER_BATCH, workers, on_bad_image, bad),
        Loader(validation, EvalTransform(preprocessing), LOADER_BATCH, workers, on_bad_image, bad),
    )
