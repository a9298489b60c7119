"""The words that arguments and command-line options are chosen from.

This module imports nothing, so that `--help` can list the words without waiting for torch.
"""

from typing import Literal

Kind = Literal["single-label", "multi-label", "regression"]
KindOrAuto = Literal["auto", "single-label", "multi-label", "regression"]
Regime = Literal["head", "class", "memory", "reader", "memory-unmasked", "full", "propagated", "additive"]
Projection = Literal["q", "k", "v", "o", "fc1", "fc2"]  # of a block: attention's four, then the MLP's two
Start = Literal["original", "normal"]  # of a class token

SplitName = Literal["test", "validation", "train"]
OnBadImage = Literal["fail", "skip"]
Check = Literal["decode", "headers", "none"]  # decode every image, read its header only, or neither
Augment = Literal["inception", "randaugment", "pad-crop", "none"]

Optimiser = Literal["sgd", "adamw"]
Part = Literal["head", "token", "cells", "gains", "low_rank"]  # of a task: each has its own factor on the learning rate
CacheMode = Literal["auto", "ram", "disk", "off"]
Storage = Literal["ram", "disk", "off"]  # where the trunks of a training are; off: computed when needed
CacheDtype = Literal["float16", "bfloat16", "float32"]
Precision = Literal["float32", "bfloat16", "float16"]
PrecisionOrAuto = Literal["auto", "float32", "bfloat16", "float16"]
