"""Closing several things at once, without executors: at the interpreter's exit those start no threads any more."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)


async def close_side_by_side(closings: Sequence[Callable[[], None]]) -> None:
    """Call all of them, each on a thread of its own; returns when all have returned. What one raises is logged."""
    loop = asyncio.get_running_loop()
    left = [loop.create_future() for _ in closings]

    def close(number: int) -> None:
        try:
            closings[number]()
        except Exception:
            logger.exception("could not close %r", closings[number])
        finally:
            loop.call_soon_threadsafe(left[number].set_result, None)

    threads = [
        threading.Thread(target=close, args=(number,), name="spark_elastic-close", daemon=True)
        for number in range(len(closings))
    ]
    for thread in threads:
        thread.start()
    await asyncio.gather(*left)
    for thread in threads:
        thread.join()  # it has said all it had to say
