import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import pool as module
from harness.pool import Pool, RankFailed


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.close()


def asleep(rank: int, payload: Any) -> None:
    if rank:
        time.sleep(60)
    dist.all_reduce(torch.zeros(1))


def failing(rank: int, payload: Any) -> None:
    assert rank, "not on rank 0"
    time.sleep(60)


def leave_a_word(rank: int, payload: Any) -> bool:
    """Whether an earlier job's word is found. The group is left to whenever its cycle is collected."""
    store: Any = dist.distributed_c10d._get_default_store()
    left: list[Any] = [dist.group.WORLD]
    left.append(left)
    found = bool(store.check(["word"]))
    dist.barrier()
    store.set("word", "")
    return found


def patience(rank: int, payload: Any) -> float:
    group: Any = dist.group.WORLD
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def brief(rank: int, payload: Any) -> int:
    time.sleep(0.2)
    return rank


def test_silent_ranks_are_told_with_where_they_stand(pool: Pool) -> None:
    with pytest.raises(RankFailed) as caught:
        pool.run("harness.test_pool:asleep", 2, limit=1)
    message = str(caught.value)
    assert message.startswith("ranks [0, 1] of 2 did not answer within 1 s")
    first, second = message.split("rank 1 stands here:")
    assert "in all_reduce" in first and "in asleep" in first
    assert "in asleep" in second and "in all_reduce" not in second


def test_a_failure_comes_first_and_then_where_the_others_stand(pool: Pool) -> None:
    with pytest.raises(RankFailed) as caught:
        pool.run("harness.test_pool:failing", 2)
    first, second = str(caught.value).split("rank 1 stands here:")
    assert "not on rank 0" in first and "in failing" in second


def test_jobs_do_not_meet_in_what_an_earlier_one_left(pool: Pool) -> None:
    for _ in range(3):
        assert pool.run("harness.test_pool:leave_a_word", 2) == [False, False]


def test_collectives_wait_as_long_as_a_job_may_take(pool: Pool) -> None:
    assert pool.run("harness.test_pool:patience", 2) == [module.LIMIT] * 2
    assert pool.run("harness.test_pool:patience", 2, limit=module.LIMIT + 60) == [module.LIMIT + 60] * 2


def test_time_while_the_tests_are_stopped_does_not_count(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)

    def stopped(*args: Any, **options: Any) -> Any:
        clock.now += 1000.0
        return waiting(*args, **options)

    waiting = module.wait
    monkeypatch.setattr(module, "wait", stopped)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=time.sleep))
    assert pool.run("harness.test_pool:brief", 2, limit=10) == [0, 1]
