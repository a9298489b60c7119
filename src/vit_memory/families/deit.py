"""transformers' DeiT: ViT with a distillation token beside the class token."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from vit_memory.families.roles import Finish
from vit_memory.families.tiny import SIZES, randomised
from vit_memory.families.transformers_layout import PlainViT, optional
from vit_memory.outputs import Original


@dataclass(frozen=True, slots=True, eq=False)
class TwoClassifiers:
    """DeiT with its teacher's head: the mean of what the class and the distillation token say."""

    norm: nn.Module
    classifier: nn.Module
    distillation_classifier: nn.Module

    def __call__(self, tokens: Tensor) -> Original:
        """Last block's output (B, N, D) to what the library returns."""
        tokens = self.norm(tokens)
        logits = (self.classifier(tokens[:, 0, :]) + self.distillation_classifier(tokens[:, 1, :])) / 2
        return Original(tokens=tokens, feature=tokens[:, 0, :], logits=logits)


@dataclass(frozen=True, slots=True)
class DeiT(PlainViT):
    """PlainViT but for the two heads."""

    def finish(self, model: nn.Module, core: nn.Module, norm: nn.Module, classifier: nn.Module | None) -> Finish:
        """How the library ends."""
        teacher_head = optional(model, "distillation_classifier")
        if teacher_head is not None:
            return TwoClassifiers(norm, model.cls_classifier, teacher_head)  # type: ignore[arg-type]
        return PlainViT.finish(self, model, core, norm, classifier)


def _tiny() -> Mapping[str, Callable[[], nn.Module]]:
    from transformers import DeiTConfig, DeiTForImageClassification, DeiTForImageClassificationWithTeacher

    config = DeiTConfig(**SIZES, num_labels=7)
    return {
        "deit": lambda: randomised(DeiTForImageClassification(config)),
        "deit:teacher": lambda: randomised(DeiTForImageClassificationWithTeacher(config)),
    }


FAMILY = DeiT(name="deit", packages=("deit",), cores=("deit",), prefix=("class", "distillation"), tiny=_tiny)
