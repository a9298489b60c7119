"""Settings that train a class token, memory cells, a learned reader and a head, or some of these.

Shape letters: B batch, T settings, R those with a class token, S all their cells, C classes, D width, L blocks, P the
parts of all heads: a head reads one vector of width D, or with a read-out several.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vit_memory.choices import Part
from vit_memory.task import Task
from vit_memory.training.reader_stacks import ReaderStacks
from vit_memory.training.sweep import Stack, Sweep


class MemorySweep(Sweep):
    """The parameters of such settings. How images and cells meet is left to the subclasses."""

    def create_parameters(self) -> dict[str, Stack]:
        """Class tokens, memory cells, heads and biases, each stacked over the settings."""
        device, backbone = self.backbone.device, self.backbone
        tasks = [setting.task for setting in self.settings]
        self.with_token = [i for i, task in enumerate(tasks) if task.class_token is not None]  # the R settings
        every = torch.arange(len(tasks), device=device)
        owner = torch.tensor(self.with_token, dtype=torch.long, device=device)
        sizes = torch.tensor([tasks[i].cells for i in self.with_token], dtype=torch.long, device=device)

        def stack(values: Tensor, owner: Tensor, axis: int, part: Part) -> Stack:
            return Stack.of(values.to(device, torch.float32, copy=True).requires_grad_(), owner, axis, part)

        empty = torch.zeros(0, backbone.width)
        tokens = [task.class_token for task in tasks if task.class_token is not None]
        cells = [tasks[i].memory for i in self.with_token]
        self.tokens = stack(torch.stack(tokens) if tokens else empty, owner, 0, "token")  # (R, D)
        self.cells = stack(  # (L, S, D)
            torch.cat(cells, dim=1) if cells else empty.expand(backbone.depth, 0, -1),
            owner.repeat_interleave(sizes),
            1,
            "cells",
        )
        parts = torch.tensor([task.read_out.parts for task in tasks], device=device)
        heads = [part for task in tasks for part in task.head_weight.chunk(task.read_out.parts, dim=1)]
        self.heads = stack(torch.stack(heads), every.repeat_interleave(parts), 0, "head")  # (P, C, D)
        self.biases = stack(torch.stack([task.head_bias for task in tasks]), every, 0, "head")  # (T, C)
        self.cell_rows = [0, *sizes.cumsum(0).tolist()]  # where the cells of each of the R settings begin
        readers = {i: task.reader for i, task in enumerate(tasks) if task.reader is not None}
        self.reader_stacks = ReaderStacks.of(readers, device)
        shared = {"tokens": self.tokens, "cells": self.cells, "heads": self.heads, "biases": self.biases}
        return {**shared, **self.reader_stacks.stacks}

    def apply_heads(self, features: Tensor) -> Tensor:
        """Logits (T, B, C) of what the heads read (P, B, D)."""
        dtype, B = self.backbone.dtype, features.shape[1]
        biases = self.biases.values[:, None].to(dtype).expand(-1, B, -1)
        heads = self.heads.values.to(dtype).transpose(1, 2)  # (P, D, C)
        if len(heads) == len(biases):
            return torch.baddbmm(biases, features, heads).float()
        return biases.index_add(0, self.heads.owner, features @ heads).float()

    def tasks(self) -> list[Task]:
        """Every setting's task with its current weights (its best ones if they are kept), on the CPU."""
        values = self.final_values()
        tasks = []
        row = {setting: i for i, setting in enumerate(self.with_token)}
        for i, setting in enumerate(self.settings):
            head = values["heads"][self.heads.owner.cpu() == i]  # (parts, C, D)
            changes: dict[str, Any] = {"head_weight": torch.cat(head.unbind(0), dim=1).contiguous()}
            changes["head_bias"] = values["biases"][i].clone()
            if i in row:
                first, last = self.cell_rows[row[i] : row[i] + 2]
                changes["class_token"] = values["tokens"][row[i]].clone()
                changes["memory"] = values["cells"][:, first:last].clone()
            if i in self.reader_stacks.untrained:
                changes["reader"] = self.reader_stacks.reader(i, values)
            tasks.append(replace(setting.task, **changes))
        return tasks
