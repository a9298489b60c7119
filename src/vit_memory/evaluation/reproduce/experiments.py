"""The experiments by name."""

from collections.abc import Mapping

from vit_memory.evaluation.reproduce.ablations import ABLATIONS
from vit_memory.evaluation.reproduce.architectures import ARCHITECTURES
from vit_memory.evaluation.reproduce.concatenation import CONCATENATION
from vit_memory.evaluation.reproduce.continual import CONTINUAL
from vit_memory.evaluation.reproduce.experiment import Experiment
from vit_memory.evaluation.reproduce.extension import EXTENSION
from vit_memory.evaluation.reproduce.fewshot import FEWSHOT
from vit_memory.evaluation.reproduce.table2 import TABLE2

EXPERIMENTS: Mapping[str, Experiment] = {
    experiment.name: experiment
    for experiment in (TABLE2, CONCATENATION, EXTENSION, ABLATIONS, CONTINUAL, FEWSHOT, ARCHITECTURES)
}
