"""What the tests of certificates certify: tasks of every composable regime on a tiny backbone, and photographs."""

import json
from dataclasses import replace

from builders import library_model, trained, trained_branch
from data.test_sources import LABELS, pictures, write_folder
from vit_memory import Bundle, load_backbone, save_task
from vit_memory.evaluation.certificates.certificate import Request
from vit_memory.task import TargetScale

IMAGES = 5


def write_world(root):
    """A backbone folder, a bundle with a branch, a task file, and photographs."""
    library_model("vit")[1].save_pretrained(root / "backbone")
    facts = {"size": {"height": 32, "width": 32}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (root / "backbone/preprocessor_config.json").write_text(json.dumps(facts))
    backbone = load_backbone(root / "backbone")
    branch = trained_branch(backbone, "side", blocks=2, rank=2)
    kinds = trained(backbone, "kinds", labels=LABELS)
    weight = trained(backbone, "weight", labels=["g"], regime="reader", rank=2, gains=True, kind="regression")
    tasks = [
        kinds,
        replace(weight, target_scale=TargetScale((20_000.0,), (5_000.0,))),
        trained(backbone, "child", regime="class", parents=[kinds]),
        trained(backbone, "plain", regime="head", branch=branch),
        trained(backbone, "sided", cells=2, branch=branch, parents=["plain"]),
    ]
    Bundle.create(root / "zoo", backbone, tasks, [branch])
    save_task(kinds, root / "kinds.safetensors")
    write_folder(root / "photos", pictures(10))
    return root


def request_of(root, *sources, **options):
    return Request(
        sources=tuple(str(root / source) for source in sources or ("zoo",)),
        data=str(root / "photos"),
        **{"images": IMAGES, "batch": 3, **options},
    )
