"""Reward functions in processes of their own: they raise, hang and die."""

from __future__ import annotations

import os
import time

import pytest

from areal_like.data.rewards import RewardError
from areal_like.data.rows import Row
from areal_like.rollout.rewards import RewardPool

ROW = Row("how many?", "4", index=7, dataset="toy")


def count(prompt, completion, row):
    return completion.count("b") / 4


def raising(prompt, completion, row):
    raise LookupError(f"no rule for {row.prompt}")


def hanging(prompt, completion, row):
    if completion == "hang":
        time.sleep(3600)
    return float(os.getpid())


def dying(prompt, completion, row):
    os._exit(3)


def flaky(prompt, completion, row):
    """Fails the first time."""
    with open(completion, "a") as file:
        file.write("x")
    if os.path.getsize(completion) < 2:
        raise ConnectionError("not yet")
    return 1.0


def infinite(prompt, completion, row):
    return float("inf")


@pytest.fixture(scope="module")
def pool():
    made = RewardPool(workers=2, timeout=20.0)
    yield made
    made.close()


def test_several_functions_at_once(pool):
    answers = [pool.submit(count, ROW, "b" * n) for n in range(5)]
    assert [answer.result() for answer in answers] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_what_it_raises_names_function_row_and_answer(pool):
    with pytest.raises(
        RewardError, match=r"raising of row 7 of toy raised LookupError: no rule for how many"
    ) as caught:
        pool.submit(raising, ROW, "the answer").result()
    assert "for the answer 'the answer'" in str(caught.value) and "raise LookupError" in str(caught.value)
    with pytest.raises(RewardError, match="infinite of row 7 of toy returned inf, which is not a finite number"):
        pool.submit(infinite, ROW, "").result()


def test_it_is_tried_again(pool, tmp_path):
    assert pool.submit(flaky, ROW, str(tmp_path / "tries")).result() == 1.0


def test_a_process_that_hangs_or_dies_is_replaced():
    pool = RewardPool(workers=1, timeout=20.0, retries=0)
    try:
        first = pool.submit(hanging, ROW, "").result()
        pool._processes[0]._timeout = 0.5
        with pytest.raises(RewardError, match=r"hanging has not finished an answer to row 7 of toy after 0\.5 s"):
            pool.submit(hanging, ROW, "hang").result()
        pool._processes[0]._timeout = 20.0
        second = pool.submit(hanging, ROW, "").result()
        assert second != first and not os.path.exists(f"/proc/{int(first)}")
        with pytest.raises(RewardError, match=r"dying, at row 7 of toy: .*exited with status 3"):
            pool.submit(dying, ROW, "").result()
        assert pool.submit(hanging, ROW, "").result() not in (first, second)
    finally:
        pool.close()


def test_a_function_that_no_process_can_find_is_refused():
    with pytest.raises(RewardError, match="must stand at the top level of a module"):
        RewardPool.check(lambda prompt, completion, row: 0.0)
