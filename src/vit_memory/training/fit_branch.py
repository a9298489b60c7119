"""fit_branch: train one branch on several datasets at once, with a task of its own for each."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from vit_memory.backbone import Backbone
from vit_memory.branch import Branch
from vit_memory.choices import CacheMode, Storage
from vit_memory.data.splits import Split
from vit_memory.data.transforms import view_size
from vit_memory.errors import TrainingError
from vit_memory.graph import TaskGraph
from vit_memory.task import Task
from vit_memory.training.batches import batch_source
from vit_memory.training.branch_sweep import BranchSweep
from vit_memory.training.cache import Cache
from vit_memory.training.callbacks import Callbacks
from vit_memory.training.checkpoint import CheckpointFile, TrainingState, training_key
from vit_memory.training.domain import DomainBatches, DomainObjective, DomainSweep, recipe_of_dataset
from vit_memory.training.fit import build_loaders, check_trainable, training_preprocessing
from vit_memory.training.objective import objective_for
from vit_memory.training.options import TrainingOptions
from vit_memory.training.recipe import Recipe
from vit_memory.training.results import FitResult, domain_results
from vit_memory.training.sweep import Setting
from vit_memory.training.trainer import Trainer
from vit_memory.training.trunk_shape import TrunkShape


@dataclass(frozen=True, slots=True, eq=False)
class TaskData:
    """A task, and the images that it is trained and scored on."""

    task: Task  # of any composable regime; the branch is given to `fit_branch`
    train: Split
    validation: Split
    cache: CacheMode | None = None  # where its rows are stored; None: as the options say


def fit_branch(
    backbone: Backbone,
    branches: Sequence[Branch],
    data: Sequence[TaskData],
    recipe: Recipe | None = None,
    *,
    options: TrainingOptions | None = None,
    callbacks: Callbacks | None = None,
    on_storages: Callable[[Sequence[Storage]], None] = lambda storages: None,
) -> FitResult:
    """Train a branch on several datasets at once; the best by the mean of their validation scores is `.best`.

    Every branch of `branches` is trained with every learning rate and weight decay of the recipe, each as a setting
    with a task of its own for every dataset. `.best.branch` is the branch, `.best.tasks` are its tasks. Every step
    takes an equal share of the batch from each dataset. Checkpoints, stores, stopping and several processes are those
    of `fit`; `on_storages` is called once, after all checks, with where the rows of each dataset will be stored.
    """
    recipe = recipe or Recipe.reader()
    options, callbacks = options or TrainingOptions(), callbacks or Callbacks()
    names = [one.task.name for one in data]
    if len(set(names)) != len(names) or not names:
        raise TrainingError(f"{', '.join(names) or 'no tasks'}: give one or more tasks, each with a name of its own.")
    preprocessing = training_preprocessing(backbone, options.image_size)
    share = recipe_of_dataset(recipe, len(data))
    points = list(product(branches, recipe.rates, recipe.weight_decays))
    parts: list[BranchSweep] = []
    for one in data:
        check_trainable(backbone, [one.task], branches, one.train, one.validation)
        objective = objective_for(one.task, recipe, one.train, one.validation)
        settings = [
            Setting(replace(one.task, branch=branch.ref), rate, decay, branch) for branch, rate, decay in points
        ]
        parts.append(BranchSweep(backbone, settings, TaskGraph(), recipe, objective))
    objectives = DomainObjective([part.objective for part in parts], [len(one.validation) for one in data])
    sweep = DomainSweep(parts, objectives, recipe)
    threads = options.threads or torch.get_num_threads()
    with options.ranks.fail_together():
        shape = TrunkShape.of(backbone, view_size(preprocessing))
        parts[0].check_memory(shape, threads * options.ranks.local_world_size)
    loaders = [build_loaders(one.train, one.validation, preprocessing, recipe, options) for one in data]
    sources = [
        batch_source(
            backbone,
            part,
            share,
            own,
            _cache(options, one),
            options.ranks,
            callbacks.on_storage,
            datasets=len(data),
        )
        for part, own, one in zip(parts, loaders, data, strict=True)
    ]
    source = DomainBatches(sources, objectives)
    on_storages([one.storage for one in sources])

    state = TrainingState.new(len(points), threads)
    checkpoint = None
    if options.checkpoint_path is not None:
        keys = [
            training_key(backbone, recipe, part, (one.train, one.validation), preprocessing, one_source.precision)
            for part, one, one_source in zip(parts, data, sources, strict=True)
        ]
        checkpoint = CheckpointFile(options.checkpoint_path, hashlib.sha256("".join(keys).encode()).hexdigest())
        if options.resume and checkpoint.path.exists():
            state = checkpoint.read(sweep)

    trainer = Trainer(backbone, sweep, recipe, source, loaders, options.ranks, state)
    trainer.run(callbacks, checkpoint, options.checkpoint_every)
    bad = loaders[0].train.bad
    for own in loaders[1:]:
        bad.reasons.update(own.train.bad.reasons)
    return FitResult(domain_results(sweep, state, recipe, preprocessing), objectives.metric, source.storage, bad)


def _cache(options: TrainingOptions, data: TaskData) -> Cache:
    return options.cache if data.cache is None else replace(options.cache, mode=data.cache)
