"""What Keras prints, printed by rank 0 alone: progress bars, and the lines of callbacks with `verbose=1`."""

from __future__ import annotations

import keras

from spark_elastic.collective.process import Position


class PrintedByRank0:
    """Turns Keras's interactive logging off on other ranks than 0, and on again on a worker that becomes rank 0.

    With it off, Keras sends what it would print to absl's log, at a level that is not shown. A program that turns it on
    itself after `init` prints on that rank.
    """

    def __init__(self) -> None:
        self._muted = False
        """This object has turned it off, and not on again."""

    def follow(self, position: Position) -> None:
        """Adapt to a new position. Called on the user's thread, because each thread has its own switch."""
        on = keras.config.is_interactive_logging_enabled()
        if position.rank != 0 and on and not self._muted:
            self._muted = True
            keras.config.disable_interactive_logging()
        elif position.rank == 0 and self._muted:
            self._muted = False
            if not on:
                keras.config.enable_interactive_logging()
