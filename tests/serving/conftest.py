"""Engines compute with one thread here: on a busy machine, torch's threads wait for each other a hundred times longer
than such small tensors take."""

import logging

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _logs_as_before():
    """The command `serve` sends logs to stderr; that of a test is closed when the test ends."""
    loggers = [logging.getLogger(name) for name in ("vit_memory", "uvicorn", "asyncio")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
