"""The promises of a server under load, in small and without limits of time; `benchmarks/serving_load.py` times them."""

import sys
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.serving_load import hot, overload, serving, soak

pytestmark = pytest.mark.slow
MORE_THREADS = 8  # asyncio starts up to six when they are first needed
MORE_FILES = 12  # of connections that a client has left, and the server has not closed yet
# Pools of the allocator grew by 58 MB. Images or bodies kept by every request would be more; a version of the tasks
# kept by every change is less, and test_engine_versions.py looks for those.
MORE_MB = 100


@pytest.fixture
def served():
    # On a busy machine a full queue could take longer than the default time, and ten times the capacity not fill it.
    with serving("--max-queue", "32", "--timeout-s", "300") as served:
        yield served
        assert psutil.pid_exists(served.pid)
        assert "raceback" not in served.log.read_text()


def check_growth(row, first="start", last="end"):
    for what, most in (("thread_count", MORE_THREADS), ("files", MORE_FILES), ("rss_mb", MORE_MB)):
        assert row[what][last] <= row[what][first] + most, row


def test_tasks_change_while_clients_ask_every_answer_is_of_one_version_and_memory_stays_bounded(served):
    row = hot(served, seconds=10, changes=20)
    assert row["failed"] == 0, row
    assert row["mixed"] == 0, row
    assert row["changes"] == 20
    assert row["versions"] >= 2, "the last change is still there when the clients ask again"
    assert row["requests"] > 30
    check_growth(row)


def test_an_overload_is_refused_with_503_what_was_admitted_is_answered_and_after_it_nothing_is_refused(served):
    row = overload(served, seconds=10)
    assert row["failed"] == 0, row
    assert set(row["statuses"]) == {"200", "503"}, row
    assert sum(row["statuses"].values()) == row["sent"]
    assert set(row["statuses_before"]) == {"200"}
    assert row["rss_mb"]["max"] < row["rss_mb"]["start"] + 1000
    check_growth(row)
    with served.load("steady", 3.0, "--connections", "8") as results:  # a quarter of the queue
        pass
    assert set(results[0]["statuses"]) == {"200"}, results


def test_a_minute_of_everything_leaves_no_threads_or_files_behind_and_memory_stays_bounded(served):
    row = soak(served, minutes=1, change_every_s=1.0)
    assert row["failed"] == 0, row
    assert row["mixed"] == 0, row
    assert row["changes"] > 20
    assert sum(row["vanished"].values()) > 10
    check_growth(row, "first", "last")
