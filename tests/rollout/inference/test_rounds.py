"""Evaluation in rounds: a round that fails leaves nobody waiting."""

from __future__ import annotations

import asyncio

import pytest

from areal_like.engines.base import SamplingParams
from areal_like.rollout.inference.rounds import RoundsInference


class Dead:
    """Stands for replicas that fail while another episode asks."""

    def generate(self, requests):
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), self.loop).result()
        raise RuntimeError("the engine is gone")


def test_who_asks_during_a_round_that_fails_is_told_too():
    async def work():
        replicas = Dead()
        replicas.loop = asyncio.get_running_loop()
        model = RoundsInference(replicas, None, SamplingParams(1))
        first = asyncio.create_task(model.agenerate([1]))
        await asyncio.sleep(0.02)  # its round is under way
        second = asyncio.create_task(model.agenerate([2]))
        for asked in (first, second):
            with pytest.raises(RuntimeError, match="the engine is gone"):
                await asyncio.wait_for(asked, 30)

    asyncio.run(work())
