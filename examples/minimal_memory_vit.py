"""Learnable memory for a vision transformer, from scratch on plain PyTorch: the whole method in one file.

Fine-tuning Image Transformers using Learnable Memory (Sandler et al., CVPR 2022). A pretrained ViT is frozen. A new
task gets a class token, a few memory cells in every block, and a head; nothing else is trained. Who reads whom:

                      original tokens    class token of k       memory cells of k
    original token         yes                 -                       -
    class token of t       yes           t and its ancestors    t and its ancestors

Original tokens never read a task, so their pass is the plain ViT's and its output stays the same to the bit. Tasks
without parents do not read each other, so they can be trained apart and put side by side (concatenation). A task with
parents builds on what these learned (extension).

    python examples/minimal_memory_vit.py      # about a minute on 2 cores

The library (src/vit_memory) computes the same for real backbones; tests/test_minimal_example.py compares the two.
Shapes: B images, N original tokens, D width, H heads, L blocks, T tasks, M cells per block, S cells of all tasks.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_memory import open_data  # only for the images: 1797 handwritten digits of 8 × 8 pixels

IMAGE, PATCH, WIDTH, HEADS, DEPTH = 8, 2, 64, 4, 4
CELLS = 5  # the paper's choice for everything
MEMORY_STD = 0.02  # the paper's, for cells that enter before the norm
Data = tuple[Tensor, Tensor]  # images (n, 1, 8, 8), targets (n,)


# ---------------------------------------------------------------------------------------------------------------------
# A plain ViT. Its only peculiarity: a block lets the tokens that it updates read a second set of tokens.


class Block(nn.Module):
    """A pre-norm transformer block: attention, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, source: Tensor, reads: Tensor | None = None) -> Tensor:
        """Update tokens x (B, n, D), which read the tokens of `source` (B, m, D) where `reads` (n, m) is True."""
        normed = self.norm1(source)
        q = self.q(self.norm1(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2)  # (B, H, n, D/H)
        k = self.k(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)  # (B, H, m, D/H)
        v = self.v(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)  # (B, H, m, D/H)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=reads)  # (B, H, n, D/H)
        x = x + self.project(attended.transpose(1, 2).flatten(2))  # (B, n, D)
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A small vision transformer for grey images (B, 1, 8, 8)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.class_token = nn.Parameter(torch.randn(WIDTH) * 0.02)
        self.positions = nn.Parameter(torch.randn(1 + (IMAGE // PATCH) ** 2, WIDTH) * 0.02)  # (N, D)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def embed(self, images: Tensor) -> Tensor:
        """Images (B, 1, 8, 8) to original tokens: the class token, then one token per patch."""
        patches = self.patches(images).flatten(2).transpose(1, 2)  # (B, D, 4, 4) to (B, 16, D)
        first = self.class_token.expand(len(images), 1, -1)  # (B, 1, D)
        return torch.cat([first, patches], dim=1) + self.positions  # (B, N, D)

    def forward(self, images: Tensor) -> Tensor:
        """The plain model's logits (B, C). No task is known here."""
        x = self.embed(images)
        for block in self.blocks:
            x = block(x, x)
        return self.head(self.norm(x[:, 0]))


# ---------------------------------------------------------------------------------------------------------------------
# The method.


class Task(nn.Module):
    """Everything that one task learns: a class token, memory cells for every block, a head."""

    def __init__(self, vit: ViT, name: str, classes: int, parents: tuple["Task", ...] = ()) -> None:
        super().__init__()
        self.name = name
        # Each once, in a plain list: parts of other tasks are not parameters of this one.
        self.ancestors = list(dict.fromkeys(other for parent in parents for other in (*parent.ancestors, parent)))
        # It starts where the original class token starts. Every class token has the position of the original one.
        self.token = nn.Parameter((vit.class_token + vit.positions[0]).detach().clone())  # (D,)
        self.memory = nn.Parameter(torch.randn(DEPTH, CELLS, WIDTH) * MEMORY_STD)  # (L, M, D)
        self.head = nn.Linear(WIDTH, classes)


def who_reads_whom(tasks: list[Task], N: int) -> Tensor:
    """The class tokens' rows of the table above, bool (T, N + T + S): True where the row reads the column."""
    T = len(tasks)
    reads = torch.zeros(T, N + T + T * CELLS, dtype=torch.bool)
    reads[:, :N] = True  # every class token reads the original tokens
    for t, task in enumerate(tasks):
        for other in (task, *task.ancestors):
            k = tasks.index(other)
            reads[t, N + k] = True  # its own class token and its ancestors'
            reads[t, N + T + k * CELLS : N + T + (k + 1) * CELLS] = True  # its own cells and its ancestors'
    return reads


def answer(vit: ViT, tasks: list[Task], images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The original logits, and the logits of every task by name, in one pass. Ancestors must be among the tasks."""
    x = vit.embed(images)  # (B, N, D)
    c = torch.stack([task.token for task in tasks]).expand(len(images), -1, -1)  # (T, D) to (B, T, D)
    reads = who_reads_whom(tasks, x.shape[1])  # (T, N + T + S)
    for i, block in enumerate(vit.blocks):
        # Every block has cells of its own. They are read and never updated, so nothing of them is handed on.
        cells = torch.cat([task.memory[i] for task in tasks]).expand(len(images), -1, -1)  # (S, D) to (B, S, D)
        c = block(c, torch.cat([x, c, cells], dim=1), reads)  # class tokens read [originals | class tokens | cells]
        x = block(x, x)  # original tokens read original tokens: the plain ViT's own line
    features = vit.norm(c)  # (B, T, D)
    return vit.head(vit.norm(x[:, 0])), {task.name: task.head(features[:, t]) for t, task in enumerate(tasks)}


# ---------------------------------------------------------------------------------------------------------------------
# Training and the demonstration.


def fit(trained: nn.Module, logits_of: Callable[[Tensor], Tensor], data: Data, steps: int, rate: float) -> None:
    """Minimise the cross-entropy of logits_of(images) with AdamW: the rate rises for a tenth of the steps, then falls.

    Only the parameters of `trained` change. It is frozen at the end.
    """
    images, targets = data
    optimiser = torch.optim.AdamW(trained.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        batch = torch.randint(len(images), (64,))
        loss = F.cross_entropy(logits_of(images[batch]), targets[batch])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    trained.requires_grad_(False)


def fit_task(vit: ViT, task: Task, data: Data, steps: int) -> None:
    """Train one task beside its ancestors, on a frozen ViT."""
    tasks = [*task.ancestors, task]
    fit(task, lambda images: answer(vit, tasks, images)[1][task.name], data, steps, rate=1e-2)


def load_digits() -> tuple[Data, Data]:
    """Training and test images (n, 1, 8, 8), pixels in -1..1, with their digits (n,)."""
    dataset = open_data("digits")
    loaded = []
    for split in (dataset.train, dataset.test):
        pixels = np.stack([split.images.read(i) for i in range(len(split))])  # (n, 8, 8) uint8
        loaded.append((torch.from_numpy(pixels)[:, None] / 127.5 - 1, torch.from_numpy(split.targets)))
    return loaded[0], loaded[1]


def accuracy(logits: Tensor, targets: Tensor) -> float:
    """In per cent."""
    return 100 * (logits.argmax(-1) == targets).double().mean().item()


@dataclass
class Findings:
    """What the demonstration found on the test images."""

    accuracy: dict[str, float]  # in per cent: of the ViT on the digits it knows, and of every task alone
    original_unchanged: bool  # to the bit, with all tasks attached
    concatenated: float  # largest change of a logit of `even` or `loop` when both are in one pass
    extended: float  # the same when `digit` extends `loop`


def largest_change(logits: dict[str, Tensor], alone: dict[str, Tensor]) -> float:
    """Between the tasks in company and the same tasks alone."""
    return max((logits[name] - alone[name]).abs().max().item() for name in alone)


def main(steps: int = 400, seed: int = 0) -> Findings:
    """Pretrain, freeze, train tasks apart, concatenate, extend. Prints what it finds, and returns it."""
    torch.manual_seed(seed)
    (images, digits), (test_images, test_digits) = load_digits()

    # The first task is the ViT's own: which of the digits 0 to 4? It never sees the digits 5 to 9.
    vit = ViT(classes=5)
    fit(vit, vit, (images[digits < 5], digits[digits < 5]), steps, rate=3e-3)
    before = vit(test_images)
    scores = {"vit": accuracy(before[test_digits < 5], test_digits[test_digits < 5])}
    print(f"ViT, pretrained on the digits 0 to 4 and then frozen: {scores['vit']:.1f} % of their test images")

    # Two tasks about all ten digits, trained apart: neither knows of the other.
    has_loop = torch.tensor([True, False, False, False, False, False, True, False, True, True]).long()
    even, loop = Task(vit, "even", classes=2), Task(vit, "loop", classes=2)
    alone = {}
    for task, target in ((even, 1 - torch.arange(10) % 2), (loop, has_loop)):  # (10,), by digit
        fit_task(vit, task, (images, target[digits]), steps)
        alone[task.name] = answer(vit, [task], test_images)[1][task.name]
        scores[task.name] = accuracy(alone[task.name], target[test_digits])
        size = sum(parameter.numel() for parameter in task.parameters())
        print(f"{task.name}, trained alone on the digits 0 to 9: {scores[task.name]:.1f} %, {size} parameters")

    # Concatenation: both in one pass, which changes neither of them, nor the ViT.
    original, together = answer(vit, [even, loop], test_images)
    concatenated = largest_change(together, alone)
    unchanged = torch.equal(original, before)
    print(f"even and loop in one pass: no logit changes by more than {concatenated:.0e}")

    # Extension: a third task that reads what `loop` learned. `loop` does not read it, and does not change.
    digit = Task(vit, "digit", classes=10, parents=(loop,))
    fit_task(vit, digit, (images, digits), steps)
    original, together = answer(vit, [even, loop, digit], test_images)
    extended = largest_change(together, alone)
    unchanged = unchanged and torch.equal(original, before)
    scores["digit"] = accuracy(together["digit"], test_digits)
    print(f"digit, which extends loop: {scores['digit']:.1f} %; even and loop change by no more than {extended:.0e}")
    print(f"the ViT's own output with all tasks attached is {'the same, bit for bit' if unchanged else 'CHANGED'}")
    return Findings(scores, unchanged, concatenated, extended)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Learnable memory from scratch, on handwritten digits.")
    parser.add_argument("--steps", type=int, default=400, help="optimiser steps of each training")
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
