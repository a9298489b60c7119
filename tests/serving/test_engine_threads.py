"""All of torch's threads compute small batches only where that is faster than one thread."""

import pytest
import torch

from vit_memory.serving import compute_threads
from vit_memory.serving.compute_threads import ComputeThreads

FIRST_RETRY = compute_threads._FIRST_RETRY


class Machine:
    """A clock, and what a token costs with one thread and with two."""

    def __init__(self, monkeypatch, one, two):
        self.now, self.cost, self.used = 0.0, {1: one, 2: two}, []
        monkeypatch.setattr(compute_threads, "time", self)

    def compute(self, tokens=10):
        threads = torch.get_num_threads()
        self.used.append(threads)
        self.now += self.cost[threads] * tokens

    def monotonic(self):
        return self.now

    perf_counter = monotonic


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run_pass(machine, threads, tokens=40):
    started = machine.now
    threads.map(lambda _: machine.compute(tokens), [None])
    threads.took(tokens, 1, machine.now - started)
    return machine.used[-1]


def test_what_is_faster_at_the_start_is_used(monkeypatch):
    for one, two, expected in ((1.0, 0.6, 2), (1.0, 1.1, 1), (1.0, 50.0, 1)):
        machine = Machine(monkeypatch, one, two)
        with ComputeThreads(torch.device("cpu"), 2) as threads:
            assert threads.should_compare
            threads.compare(machine.compute, 10)
            assert machine.used.count(2) == (1 if two == 50 else 2)  # what is slow is tried once
            assert run_pass(machine, threads) == expected
        assert torch.get_num_threads() == 2  # as it was given


def test_all_threads_are_given_up_when_others_take_the_cores_and_used_again_when_they_are_free(monkeypatch):
    machine = Machine(monkeypatch, 1.0, 0.6)
    with ComputeThreads(torch.device("cpu"), 2) as threads:
        threads.compare(machine.compute, 10)
        machine.cost[2] = 2.0  # a little slower than one: a hiccup is no reason
        assert [run_pass(machine, threads) for _ in range(3)] == [2, 2, 2]
        machine.cost[2] = 100.0
        assert [run_pass(machine, threads) for _ in range(3)] == [2, 1, 1]
        machine.now += FIRST_RETRY
        assert threads.should_compare
        threads.compare(machine.compute, 10)  # still busy: the next trial comes later
        machine.now += FIRST_RETRY + 1
        assert not threads.should_compare
        machine.now += FIRST_RETRY
        machine.cost[2] = 0.6
        assert threads.should_compare
        threads.compare(machine.compute, 10)
        assert run_pass(machine, threads) == 2
        assert not threads.should_compare


def test_one_thread_is_never_compared_with_itself():
    with ComputeThreads(torch.device("cpu"), 1) as threads:
        assert not threads.should_compare
        assert threads.map(lambda x: (x, torch.get_num_threads()), ["a", "b"]) == [("a", 1), ("b", 1)]


def test_chunks_of_a_batch_share_the_threads():
    with ComputeThreads(torch.device("cpu"), 2) as threads:
        assert threads.map(lambda x: (x, torch.get_num_threads()), ["a", "b"]) == [("a", 1), ("b", 1)]
