"""Engines compute with one thread here: on a busy machine, torch's threads wait for each other a hundred times longer
than such small tensors take."""

import logging

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_log_handlers():
    """Commands send logs to stderr, and that of a test is closed when the test ends: begin and end without."""
    loggers = [logging.getLogger(name) for name in ("vit_memory", "uvicorn", "asyncio", "python_multipart")]

    def reset():
        for logger in loggers:
            logger.handlers, logger.propagate = [], True
            logger.setLevel(logging.NOTSET)

    reset()
    yield
    reset()
