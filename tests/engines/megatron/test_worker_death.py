"""A rank that dies in the middle of a step: the driver knows at once, and no process stays."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from areal_like.alloc import ModelAllocation
from areal_like.runtime.dispatch import scatter
from areal_like.runtime.local import WorkerError, WorkerGroup


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_rank_killed_in_the_middle_of_a_step(models, helpers):
    from megatron_hosts import DyingLoss

    text = "megatron:d2"
    with WorkerGroup.start("actor", "megatron_hosts:EngineHost", {}, 2) as group:
        pids = group.process_ids
        group.call("build", text, helpers.engine_config(text, models("qwen3")))
        shards = scatter(helpers.random_batch([20, 30, 9]), ModelAllocation.parse(text).mesh()).shards
        start = time.monotonic()
        with pytest.raises(WorkerError) as raised:
            group.call_each("do", [("train_batch", shard, DyingLoss(rank=1)) for shard in shards])
        assert time.monotonic() - start < 10
        assert raised.value.rank == 1 and raised.value.exit_code == -9
        assert "SIGKILL" in str(raised.value) and "actor rank 1" in str(raised.value)
        deadline = time.monotonic() + 5
        while any(map(alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [pid for pid in pids if alive(pid)] == []
        with pytest.raises(WorkerError):
            group.call("do", "close")
