"""The pipeline in a thread of its own, for a trainer that has no event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from areal_like.rollout.pipeline.pipeline import Batch, RolloutPipeline

__all__ = ["PipelineThread"]


class PipelineThread:
    """Runs a `RolloutPipeline` beside the caller.

    Args:
        make: builds the pipeline; called in the thread, inside its event loop.
    """

    def __init__(self, make: Callable[[], RolloutPipeline]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rollout-pipeline", daemon=True)
        self._thread.start()
        self._closed = False

        async def build() -> RolloutPipeline:
            return make()

        try:
            self.pipeline = self.wait(build())
        except BaseException:
            self._stop()
            raise

    def start(self) -> None:
        """Begin to generate."""
        self._loop.call_soon_threadsafe(self.pipeline.start)

    def take(self) -> Batch | None:
        """See `RolloutPipeline.take`."""
        return self.wait(self.pipeline.take())

    def installed(self, version: int) -> None:
        """See `RolloutPipeline.installed`."""
        self.wait(self.pipeline.installed(version))

    def wait[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, and wait for what it returns or raises; Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except (KeyboardInterrupt, concurrent.futures.CancelledError):
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel whatever is under way, and end the thread. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self.wait(self.pipeline.close())
        self._stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
