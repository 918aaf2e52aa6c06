"""What Keras prints, printed by rank 0 alone: progress bars, and the lines of callbacks with `verbose=1`."""

from __future__ import annotations

import keras

from spark_elastic.collective.process import Position

_muted = False
"""`print_by_rank_0` has turned Keras's interactive logging off, and not on again."""


def print_by_rank_0(position: Position) -> None:
    """Turn Keras's interactive logging off on other ranks than 0, and on again on a worker that becomes rank 0.

    With it off, Keras sends what it would print to absl's log, at a level that is not shown. A program that turns it on
    itself after `init` prints on that rank. Called on the user's thread, because each thread has its own switch.
    """
    global _muted
    on = keras.config.is_interactive_logging_enabled()
    if position.rank != 0 and on and not _muted:
        _muted = True
        keras.config.disable_interactive_logging()
    elif position.rank == 0 and _muted:
        _muted = False
        if not on:
            keras.config.enable_interactive_logging()
