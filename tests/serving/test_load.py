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


@pytest.fixture
def served():
    # On a busy machine a full queue could take longer than the default time, and ten times the capacity not fill it.
    with serving("--max-queue", "32", "--timeout-s", "300") as served:
        yield served
        assert psutil.pid_exists(served.pid)
        assert "raceback" not in served.log.read_text()


def check_ends(row):
    for what, most in (("threads", MORE_THREADS), ("files", MORE_FILES)):
        assert row[what]["end"] <= row[what]["start"] + most, row


def test_tasks_change_while_clients_ask_and_every_answer_is_of_one_version(served):
    row = hot(served, seconds=10, changes=20)
    assert row["failed"] == 0, row
    assert row["mixed"] == 0, row
    assert row["changes"] == 20
    assert row["versions"] >= 2, "the last change is still there when the clients ask again"
    assert row["requests"] > 30
    check_ends(row)


def test_an_overload_is_refused_with_503_and_what_was_admitted_is_answered(served):
    row = overload(served, seconds=10)
    assert row["failed"] == 0, row
    assert set(row["statuses"]) == {"200", "503"}, row
    assert sum(row["statuses"].values()) == row["sent"]
    assert set(row["statuses_before"]) == {"200"}
    assert row["statuses_after"]["200"] > 0
    assert row["rss_mb"]["max"] < row["rss_mb"]["start"] + 1000
    check_ends(row)


def test_a_minute_of_everything_leaves_nothing_behind(served):
    row = soak(served, minutes=1, change_every_s=1.0)
    assert row["failed"] == 0, row
    assert row["mixed"] == 0, row
    assert row["changes"] > 20
    assert sum(row["vanished"].values()) > 10
    for what, most in (("threads", MORE_THREADS), ("files", MORE_FILES)):
        assert row[what]["last"] <= row[what]["first"] + most, row
