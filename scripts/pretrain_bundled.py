"""Train the backbone in the box from scratch, by distillation from DINOv2-S and from labels.

    python scripts/pretrain_bundled.py --shared ../shared --work /tmp/pretrain            (about 70 minutes on 2 cores)
    python scripts/pretrain_bundled.py --shared ../shared --work /tmp/pretrain --resume   (after it was stopped)

The teacher looks at every image once, whole; its 7 × 7 map of patch features is kept. The student sees another crop
at every step, and its targets are read off that map at the places its own patches came from, so that augmentation
needs no second look of the teacher. For most of the training it sees half of its patches only: that halves the cost
of a step, and the targets of a patch do not depend on its neighbours being there.

Never read: test images of any pack, and any image of the packs held out from pretraining.
"""

import argparse
import hashlib
import io
import json
import math
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from vit_memory.families.bundled import PREPROCESSING, BundledViT

TRAIN_PACKS = ("caltech30", "cifar100", "dtd10", "miniplaces40", "sun8")
HELD_OUT = ("aid30", "brainmri4", "flowers30", "signdigits10", "trashnet6")
SIDE = 72  # what images are kept at; the pool's short side
TEACHER_SIDE, TEACHER_GRID, TEACHER_WIDTH = 98, 7, 384
SEEN_SIDE, SEEN_GRID = 64, 8  # the student's


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the weights, besides the images and the teacher."""

    steps: int = 1900
    batch: int = 128
    rate_matrices: float = 6e-3  # Muon, for the matrices of the blocks
    rate_others: float = 2e-3  # AdamW, for all else
    weight_decay: float = 0.05
    warmup: int = 40
    clip: float = 1.0
    smallest_crop: float = 0.3  # share of the area
    jitter: float = 0.3  # brightness, contrast, saturation
    grey: float = 0.1  # share of images made grey
    patches_seen: int = 32  # of 64 ...
    whole_from: float = 0.9  # ... until this share of the steps, then all
    weight_pooled: float = 1.0  # class token -> mean of the teacher's patches in the crop
    weight_class: float = 0.5  # class token -> the teacher's class token, which saw the whole image
    weight_patch: float = 1.0  # patch tokens -> the teacher's patches at the same places
    weight_label: float = 0.2  # class token -> label, among the labels of the image's own source
    fewest_per_label: int = 5  # rarer labels teach nothing
    smoothing: float = 0.1
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Material:
    """The training images, in the order of their digests."""

    digests: list[str]  # sha256 of the file bytes
    pixels: Tensor  # (n, 3, SIDE, SIDE) uint8
    labels: Tensor  # (n,) int64, -1 for none
    groups: Tensor  # (labels,) int64, the source each label belongs to

    def digest(self) -> str:
        """One digest for the whole set: what the card names."""
        return hashlib.sha256("".join(self.digests).encode()).hexdigest()


def training_files(shared: Path) -> dict[str, tuple[bytes, tuple[str, str] | None]]:
    """Every training image by its digest: file bytes, and (source, label) where it has a label."""
    import pyarrow.parquet as pq

    found: dict[str, tuple[bytes, tuple[str, str] | None]] = {}
    for path in sorted((shared / "data/pool").glob("*.parquet")):
        table = pq.read_table(path)
        for row in table.to_pylist():
            label = None if row["label"] is None else (row["source"], row["label"])
            found.setdefault(hashlib.sha256(row["image"]["bytes"]).hexdigest(), (row["image"]["bytes"], label))
    for pack in TRAIN_PACKS:
        for row in pq.read_table(shared / "data" / pack / "train.parquet").to_pylist():
            label = (f"pack {pack}", str(row["label"]))
            found.setdefault(hashlib.sha256(row["image"]["bytes"]).hexdigest(), (row["image"]["bytes"], label))
    return dict(sorted(found.items()))


def pixel_digest(encoded: bytes) -> str:
    """Of the decoded pixels: the same for every way to store an image without loss."""
    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    return hashlib.sha256(str(image.size).encode() + image.tobytes()).hexdigest()


def read_material(shared: Path, fewest_per_label: int) -> Material:
    """Decode the centre square of every training image."""
    found = training_files(shared)
    pixels = torch.empty(len(found), 3, SIDE, SIDE, dtype=torch.uint8)
    for i, (encoded, _) in enumerate(found.values()):
        image = Image.open(io.BytesIO(encoded)).convert("RGB")
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        box = (left, top, left + side, top + side)
        square = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=box)
        pixels[i] = torch.from_numpy(np.array(square)).permute(2, 0, 1)
    counts = Counter(label for _, label in found.values() if label is not None)
    kept = sorted(label for label, count in counts.items() if count >= fewest_per_label)
    place = {label: i for i, label in enumerate(kept)}
    sources = sorted({source for source, _ in kept})
    return Material(
        digests=list(found),
        pixels=pixels,
        labels=torch.tensor([place.get(label, -1) if label else -1 for _, label in found.values()]),
        groups=torch.tensor([sources.index(source) for source, _ in kept]),
    )


def normalise(pixels: Tensor) -> Tensor:
    """(B, 3, h, w) in 0..1 to what teacher and student read; both use ImageNet's mean and spread."""
    mean, std = torch.tensor(PREPROCESSING.mean), torch.tensor(PREPROCESSING.std)
    return (pixels - mean[:, None, None]) / std[:, None, None]


def teach(material: Material, shared: Path, work: Path) -> tuple[np.memmap, np.memmap]:
    """The teacher's class tokens (n, 384) and patch maps (n, 49, 384), float16 on disk; continues where it stopped."""
    from transformers import AutoModel

    n = len(material.digests)
    done = work / "teacher.json"
    begun = json.loads(done.read_text()) if done.exists() else {}
    start = begun.get("done", 0) if begun.get("digest") == material.digest() else 0
    mode = "r+" if start else "w+"
    classes = np.memmap(work / "teacher-class.f16", np.float16, mode, shape=(n, TEACHER_WIDTH))
    patches = np.memmap(work / "teacher-patches.f16", np.float16, mode, shape=(n, TEACHER_GRID**2, TEACHER_WIDTH))
    if start == n:
        return classes, patches
    teacher = AutoModel.from_pretrained(shared / "weights/dinov2-s14-reg-fp16", dtype=torch.float32).eval()
    registers = teacher.config.num_register_tokens
    clock = time.perf_counter()
    for first in range(start, n, 64):
        batch = material.pixels[first : first + 64].float() / 255
        batch = F.interpolate(batch, (TEACHER_SIDE, TEACHER_SIDE), mode="bicubic").clamp(0, 1)
        with torch.inference_mode():
            tokens = teacher(normalise(batch)).last_hidden_state
        classes[first : first + 64] = tokens[:, 0].half().numpy()
        patches[first : first + 64] = tokens[:, 1 + registers :].half().numpy()
        if first // 64 % 40 == 39 or first + 64 >= n:
            classes.flush()
            patches.flush()
            write_text(done, json.dumps({"digest": material.digest(), "done": min(first + 64, n)}))
            rate = (first + 64 - start) / (time.perf_counter() - clock)
            print(f"teacher: {min(first + 64, n)} of {n} images, {rate:.0f} / s", flush=True)
    return classes, patches


class Student(nn.Module):
    """The backbone and what it is taught through, which is thrown away."""

    def __init__(self, labels: int) -> None:
        super().__init__()
        self.vit = BundledViT()
        width = self.vit.norm.normalized_shape[0]
        self.to_pooled = nn.Linear(width, TEACHER_WIDTH)
        self.to_class = nn.Linear(width, TEACHER_WIDTH)
        self.to_patch = nn.Linear(width, TEACHER_WIDTH)
        self.to_label = nn.Linear(width, labels)

    def begin(self, generator: torch.Generator) -> None:
        """Draw every weight; positions start as waves of row and column, which learn faster than noise."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02, generator=generator)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Conv2d):
                fan_in = module.weight[0].numel()
                nn.init.trunc_normal_(module.weight, std=(2 / fan_in) ** 0.5, generator=generator)
                nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.vit.class_token, std=0.02, generator=generator)
        grid, width = self.vit.grid, self.vit.norm.normalized_shape[0]
        rate = 100.0 ** -(torch.arange(width // 4) / (width // 4))
        row, column = torch.meshgrid(torch.arange(grid).float(), torch.arange(grid).float(), indexing="ij")
        angles = [axis.reshape(-1, 1) * rate for axis in (row, column)]
        waves = torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1)
        with torch.no_grad():
            self.vit.patch_positions.copy_(0.2 * waves)

    def forward(self, images: Tensor, seen: Tensor) -> Tensor:
        """Final tokens (B, 1 + seen, D) of the class token and the seen patches (B, seen)."""
        tokens = self.vit.embed(images)
        rows = torch.arange(len(images))[:, None]
        tokens = torch.cat([tokens[:, :1], tokens[rows, 1 + seen]], dim=1)
        for block in self.vit.blocks:
            tokens = block(tokens)
        return self.vit.norm(tokens)


def crops(count: int, recipe: Recipe, rng: torch.Generator) -> Tensor:
    """Random crops with random mirroring, as affine maps (B, 2, 3) from crop to image coordinates in -1..1."""
    area = torch.empty(count).uniform_(recipe.smallest_crop, 1, generator=rng)
    ratio = torch.empty(count).uniform_(-0.29, 0.29, generator=rng).exp()  # 3:4 to 4:3
    height, width = (area / ratio).sqrt().clamp(max=1), (area * ratio).sqrt().clamp(max=1)
    across, down = torch.empty(2, count).uniform_(-1, 1, generator=rng)
    mirror = torch.where(torch.rand(count, generator=rng) < 0.5, -1.0, 1.0)
    zero = torch.zeros(count)
    return torch.stack(
        [
            torch.stack([width * mirror, zero, across * (1 - width)], 1),
            torch.stack([zero, height, down * (1 - height)], 1),
        ],
        dim=1,
    )


def recolour(images: Tensor, recipe: Recipe, rng: torch.Generator) -> Tensor:
    """Brightness, contrast and saturation, and grey, drawn per image."""

    def draw() -> Tensor:
        return torch.empty(len(images), 1, 1, 1).uniform_(1 - recipe.jitter, 1 + recipe.jitter, generator=rng)

    images = images * draw()
    centre = images.mean((1, 2, 3), keepdim=True)
    images = centre + (images - centre) * draw()
    grey = (images * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
    drained = torch.rand(len(images), 1, 1, 1, generator=rng) < recipe.grey
    return (grey + (images - grey) * torch.where(drained, torch.zeros(()), draw())).clamp(0, 1)


class Muon(torch.optim.Optimizer):
    """Momentum, then the nearest orthogonal matrix as the step: on this little data twice as fast per image as AdamW.

    torch has one that works in bfloat16, which CPUs without such units compute a hundred times slower than float32.
    """

    def __init__(self, matrices: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One step of every matrix; queries, keys and values stacked in one are three."""
        for group in self.param_groups:
            for matrix in group["params"]:
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                state["momentum"].lerp_(matrix.grad, 1 - group["momentum"])
                ahead = matrix.grad.lerp(state["momentum"], group["momentum"])  # Nesterov
                parts = ahead.chunk(3) if matrix.shape[0] == 3 * matrix.shape[1] else (ahead,)
                # 0.2 sqrt(longer side) gives steps the size that AdamW's have at the same rate.
                size = group["lr"] * 0.2 * max(parts[0].shape) ** 0.5
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.sub_(torch.cat([orthogonal(part) for part in parts]), alpha=size)


def orthogonal(matrix: Tensor) -> Tensor:
    """Roughly the nearest orthogonal matrix: five Newton-Schulz steps push every singular value towards 1."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(5):  # the quintic whose slope at 0 is largest without leaving 0.7 .. 1.2 (Jordan et al., 2024)
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


def optimisers_for(student: Student, recipe: Recipe) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the blocks' matrices, AdamW for the rest; biases, norms and tokens do not decay."""
    matrices = [p for p in student.vit.blocks.parameters() if p.dim() == 2]
    taken = {id(p) for p in matrices}
    rest = [p for p in student.parameters() if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.dim() in (2, 4)], "weight_decay": recipe.weight_decay},
        {"params": [p for p in rest if p.dim() not in (2, 4)], "weight_decay": 0.0},
    ]
    return (
        Muon(matrices, lr=recipe.rate_matrices, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(groups, lr=recipe.rate_others, betas=(0.9, 0.95)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What the student sees in one step, and what it should say."""

    images: Tensor  # (B, 3, 64, 64), normalised crops
    seen: Tensor  # (B, patches seen), which of the 64
    pooled: Tensor  # (B, 384)
    token: Tensor  # (B, 384)
    patches: Tensor  # (B, patches seen, 384)
    labels: Tensor  # (B,), -1 for none


class Lessons:
    """Makes the material of any step. All that is random in a step is drawn from its own seed."""

    def __init__(self, material: Material, features: tuple[np.memmap, np.memmap], recipe: Recipe) -> None:
        self.material, self.recipe = material, recipe
        self.classes, self.maps = features
        sample = self.maps[:: max(1, len(self.maps) // 4000)].astype(np.float32)
        self.scale_patch = moments(torch.from_numpy(sample.reshape(-1, TEACHER_WIDTH)))
        self.scale_pooled = moments(torch.from_numpy(sample.mean(1)))
        self.scale_class = moments(torch.from_numpy(self.classes[:].astype(np.float32)))

    def step(self, step: int) -> Step:
        """The material of step number `step`."""
        recipe, material = self.recipe, self.material
        rng = torch.Generator().manual_seed((recipe.seed + 1) * 1_000_003 + step)
        chosen = self._chosen(step)
        cut = crops(len(chosen), recipe, rng)
        images = sampled(material.pixels[chosen].float() / 255, cut, SEEN_SIDE)
        images = normalise(recolour(images, recipe, rng))
        maps = torch.from_numpy(self.maps[chosen.numpy()].astype(np.float32))
        maps = maps.transpose(1, 2).unflatten(2, (TEACHER_GRID, TEACHER_GRID))
        # (B, 64, 384): the teacher's features where the student's patches came from
        taught = sampled(maps, cut, SEEN_GRID).flatten(2).transpose(1, 2)
        part = recipe.patches_seen if step < recipe.whole_from * recipe.steps else SEEN_GRID**2
        seen = torch.rand(len(chosen), SEEN_GRID**2, generator=rng).argsort(1)[:, :part]
        token = torch.from_numpy(self.classes[chosen.numpy()].astype(np.float32))
        return Step(
            images=images,
            seen=seen,
            pooled=standard(taught.mean(1), self.scale_pooled),
            token=standard(token, self.scale_class),
            patches=standard(taught[torch.arange(len(chosen))[:, None], seen], self.scale_patch),
            labels=material.labels[chosen],
        )

    def _chosen(self, step: int) -> Tensor:
        per_epoch = len(self.maps) // self.recipe.batch
        epoch = torch.Generator().manual_seed(self.recipe.seed + 7919 * (step // per_epoch))
        order = torch.randperm(len(self.maps), generator=epoch)
        return order[step % per_epoch * self.recipe.batch :][: self.recipe.batch]


def sampled(values: Tensor, cut: Tensor, side: int) -> Tensor:
    """Crops (B, C, side, side) of (B, C, h, w)."""
    grid = F.affine_grid(cut, [len(values), 1, side, side], align_corners=False)
    return F.grid_sample(values, grid, padding_mode="border", align_corners=False)


def losses_of(student: Student, step: Step, groups: Tensor, recipe: Recipe) -> dict[str, Tensor]:
    """Each loss by the name of its weight."""
    tokens = student(step.images, step.seen)
    token, patches = tokens[:, 0], tokens[:, 1:]
    return {
        "pooled": F.mse_loss(student.to_pooled(token), step.pooled),
        "class": F.mse_loss(student.to_class(token), step.token),
        "patch": F.mse_loss(student.to_patch(patches), step.patches),
        "label": label_loss(student.to_label(token), step.labels, groups, recipe.smoothing),
    }


def train(lessons: Lessons, work: Path, *, resume: bool, checkpoint_every: int = 100) -> Student:
    """Run the recipe, from the last checkpoint if asked to: resuming changes nothing but the time."""
    material, recipe = lessons.material, lessons.recipe
    student = Student(len(material.groups))
    student.begin(torch.Generator().manual_seed(recipe.seed))
    optimisers = optimisers_for(student, recipe)
    rates = [[group["lr"] for group in optimiser.param_groups] for optimiser in optimisers]
    checkpoint, first = work / "checkpoint.pt", 0
    if resume and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if (state["recipe"], state["images"]) != (asdict(recipe), material.digest()):
            raise SystemExit(f"{checkpoint} belongs to another recipe or other images: start without --resume.")
        student.load_state_dict(state["student"])
        for optimiser, stored in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(stored)
        first = state["step"]
        print(f"resuming at step {first}", flush=True)
    clock = time.perf_counter()
    for step in range(first, recipe.steps):
        losses = losses_of(student, lessons.step(step), material.groups, recipe)
        share = min((step + 1) / recipe.warmup, 0.5 * (1 + math.cos(math.pi * step / recipe.steps)))
        for optimiser, given in zip(optimisers, rates, strict=True):
            for group, rate in zip(optimiser.param_groups, given, strict=True):
                group["lr"] = rate * share
        student.zero_grad()
        sum(getattr(recipe, f"weight_{name}") * value for name, value in losses.items()).backward()
        nn.utils.clip_grad_norm_(student.parameters(), recipe.clip)
        for optimiser in optimisers:
            optimiser.step()
        if step % 25 == 24:
            rate = (step + 1 - first) * recipe.batch / (time.perf_counter() - clock)
            told = {name: round(value.item(), 4) for name, value in losses.items()}
            left = (recipe.steps - step - 1) * recipe.batch / rate / 60
            print(f"step {step + 1} of {recipe.steps}  {told}  {rate:.0f} images/s  {left:.0f} min left", flush=True)
        if step % checkpoint_every == checkpoint_every - 1 or step + 1 == recipe.steps:
            kept = [optimiser.state_dict() for optimiser in optimisers]
            state = {"student": student.state_dict(), "optimisers": kept, "step": step + 1}
            torch.save(state | {"recipe": asdict(recipe), "images": material.digest()}, f"{checkpoint}.partial")
            Path(f"{checkpoint}.partial").replace(checkpoint)
    return student


def moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and spread of every dimension: the teacher's dimensions differ in scale a hundredfold."""
    return values.mean(0), values.std(0) + 1e-6


def standard(values: Tensor, scale: tuple[Tensor, Tensor]) -> Tensor:
    """Zero mean, unit spread, and no single dimension far out."""
    return ((values - scale[0]) / scale[1]).clamp(-5, 5)


def label_loss(logits: Tensor, labels: Tensor, groups: Tensor, smoothing: float) -> Tensor:
    """Cross-entropy of the labelled images, each among the labels of its own source."""
    labelled = labels >= 0
    if not bool(labelled.any()):
        return logits.sum() * 0
    labels = labels[labelled]
    allowed = groups[labels][:, None] == groups  # (labelled, labels)
    chances = logits[labelled].masked_fill(~allowed, -1e4).log_softmax(-1)
    right = -chances.gather(1, labels[:, None])[:, 0]
    spread = -(chances * allowed).sum(1) / allowed.sum(1)
    return ((1 - smoothing) * right + smoothing * spread).mean()


def write_text(path: Path, text: str) -> None:
    """The whole file or the old one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/ and weights/")
    parser.add_argument("--work", type=Path, required=True, help="folder for teacher features and checkpoints (1.3 GB)")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --work")
    parser.add_argument("--steps", type=int, default=Recipe().steps, help="fewer for a trial")
    parser.add_argument("--out", type=Path, default=Path("src/vit_memory/families/bundled.safetensors"))
    parser.add_argument("--record", type=Path, default=Path("results/bundled.json"), help="what it was made from")
    asked = parser.parse_args()
    from safetensors.torch import save_file

    recipe = Recipe(steps=asked.steps)
    asked.work.mkdir(parents=True, exist_ok=True)
    material = read_material(asked.shared, recipe.fewest_per_label)
    labelled = int((material.labels >= 0).sum())
    print(f"{len(material.digests)} images, {labelled} with one of {len(material.groups)} labels", flush=True)
    lessons = Lessons(material, teach(material, asked.shared, asked.work), recipe)
    student = train(lessons, asked.work, resume=asked.resume)
    weights = {name: value.detach().half().contiguous() for name, value in student.vit.state_dict().items()}
    partial = asked.out.with_name(asked.out.name + ".partial")
    save_file(weights, partial)
    partial.replace(asked.out)
    facts = {"recipe": asdict(recipe), "images": len(material.digests), "images_digest": material.digest()}
    facts["weights_sha256"] = hashlib.sha256(asked.out.read_bytes()).hexdigest()
    write_text(asked.record, json.dumps({"format": "vit-memory-bundled/1", **facts}, indent=2) + "\n")
    print(f"wrote {asked.out}, {asked.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
