"""Engines compute with one thread here: on a busy machine, torch's threads wait for each other a hundred times longer
than such small tensors take."""

import torch

torch.set_num_threads(1)
