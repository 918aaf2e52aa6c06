"""What Spark itself prints beside our lines: its progress bar is hidden meanwhile, and its log shows warnings only."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from spark_elastic.spark.jvm import close_connection, setting_of

HIDE_EVERY_S = 0.2
"""Spark draws its bar for stages that last longer than half a second after the last `finishAll`."""
CLOSE_S = 2.0
QUIET_LEVEL = "WARN"
_SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""The environment variable that `spark-submit` gives the Python programs that it starts."""
_DEFAULT_FLAG = "org$apache$spark$internal$Logging$$defaultSparkLog4jConfig"

_quieted: set[str] = set()
"""The applications whose log was looked at."""

# --- Spark's progress bar ---------------------------------------------------------------------------


@contextlib.contextmanager
def bar_hidden(context: Any) -> Iterator[None]:
    """Hide Spark's console bar (`spark.ui.showConsoleProgress`) while the block runs, where another bar is shown.

    Both draw in the same line of the terminal, and Spark's would show the workers' tasks, which end with the training.
    A thread removes it again and again, as Spark does itself at the end of a job.
    """
    over = threading.Event()

    def hide() -> None:
        with contextlib.suppress(Exception):  # the context was stopped, or its JVM is gone
            bar = context._jsc.sc().progressBar()
            while bar.isDefined():
                bar.get().finishAll()
                if over.wait(HIDE_EVERY_S):
                    break
        close_connection(context)

    thread = threading.Thread(target=hide, name="spark_elastic console", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(CLOSE_S)


# --- Spark's log ------------------------------------------------------------------------------------


def quiet_log(context: Any) -> None:
    """Have Spark log warnings only, as where `python` starts a program, if nobody has configured its log.

    `spark-submit` starts programs with Spark's default log at INFO, some ten lines for each task. A log4j configuration
    of the user's or of the cluster, `spark.log.level`, and what the program has set with `setLogLevel` are left as they
    are. Looked at once per application.
    """
    if _SUBMITTED not in os.environ or context.applicationId in _quieted:
        return
    _quieted.add(context.applicationId)
    with contextlib.suppress(Exception):  # the classes of a vendor's Spark may differ
        # nobody has configured log4j: Spark uses the configuration in its own jar
        spark = context._jvm.java.lang.Class.forName("org.apache.spark.internal.Logging$").getField("MODULE$").get(None)
        if setting_of(context, "spark.log.level") is not None or not getattr(spark, _DEFAULT_FLAG)():
            return
        # spark-submit sets a threshold for its own lines, which has no effect on the program's; setLogLevel removes it
        if spark.sparkShellThresholdLevel() is None:
            return
        if str(context._jvm.org.apache.logging.log4j.LogManager.getRootLogger().getLevel()) == "INFO":
            context.setLogLevel(QUIET_LEVEL)
            print(
                "spark_elastic: Spark's log shows only warnings from here on;\n"
                "    spark-submit --conf spark.log.level=INFO shows all of it",
                file=sys.stderr,
                flush=True,
            )
