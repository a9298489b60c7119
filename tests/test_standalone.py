"""Promise 4 for tasks that answer alone: one never answers on a backbone that it was not trained on."""

import copy
import json

import pytest
import torch
from typer.testing import CliRunner

from builders import images, library_model, trained
from data.test_sources import LABELS, pictures, write_folder
from vit_memory import BackboneMismatch, UnknownTask, load_backbone, save_task
from vit_memory.cli import app
from vit_memory.standalone import StandaloneModel

REGIMES = ["memory-unmasked", "propagated", "additive", "full"]
PREPARED = {"size": {"height": 32, "width": 32}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def other_weights(model):
    """The same shape, and weights that moved a little."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01)
    return other


@pytest.mark.parametrize("regime", REGIMES)
def test_a_task_that_answers_alone_is_refused_by_a_backbone_of_equal_shape(regime):
    model = library_model("vit")[1]
    own, other = load_backbone(model), load_backbone(other_weights(model))
    task = trained(own, "task", regime=regime)
    assert list(StandaloneModel(own, task)(images(), ["task"])) == ["task"]
    with pytest.raises(BackboneMismatch, match="same shape, other weights") as error:
        StandaloneModel(other, task)
    assert ("task.backbone.safetensors" in str(error.value)) == (regime == "full")
    with pytest.raises(UnknownTask, match=r"no task 'tusk'. Attached: task"):
        StandaloneModel(own, task)(images(), ["tusk"])


@pytest.mark.parametrize("regime", ["memory-unmasked", "propagated", "additive"])
def test_the_commands_refuse_it_too(regime, tmp_path):
    for name, model in (("own", library_model("vit")[1]), ("other", other_weights(library_model("vit")[1]))):
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "preprocessor_config.json").write_text(json.dumps(PREPARED))
    save_task(
        trained(load_backbone(tmp_path / "own"), "task", regime=regime, labels=LABELS), tmp_path / "task.safetensors"
    )
    photos = str(write_folder(tmp_path / "photos", pictures(4)))
    evaluate = ["evaluate", str(tmp_path / "task.safetensors"), "--data", photos]
    predict = ["predict", photos, "--bundle", str(tmp_path / "task.safetensors")]
    for words in (evaluate, predict):
        assert CliRunner().invoke(app, words).exit_code == 0
        refused = CliRunner().invoke(app, [*words, "--backbone", str(tmp_path / "other")])
        assert isinstance(refused.exception, BackboneMismatch), refused.output
        assert "task 'task' was trained on" in str(refused.exception)
