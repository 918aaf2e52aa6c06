"""`spark_elastic.doctor`: whether a cluster is fit for training, and what to do where it is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spark_elastic.diagnostics.findings import PROBLEM, Finding, Report
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.settings import whole_number

__all__ = ["Finding", "Report", "doctor"]


def doctor(
    spark: Any = None,
    *,
    store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    timeout: float = 60.0,
) -> Report:
    """Look at this machine, the Spark session and its executors, and say what is wrong and how to mend it.

    Runs one short Spark job with a task for each slot, in which executors connect to the driver and to one another,
    write files, tell their time and import torch.

    Args:
        spark: a SparkSession or SparkContext. Default: the active one.
        store: where estimators are to keep their data; default: their own default, a temporary folder.
        storage_options: for `store`, as in estimators.
        num_proc: workers that are to train.
        timeout: seconds that all of it may take, whatever hangs.

    Returns: a `Report`: `print` it, let a notebook show it, or read `ok`, `findings` and `to_json()`.
    Raises: InvalidSettingsError: `num_proc` or `timeout` is no such number.
    """
    from spark_elastic.diagnostics.examination import Examination, within

    if num_proc is not None:
        num_proc = whole_number("num_proc", num_proc, at_least=1)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 1 <= timeout <= 3600:
        raise InvalidSettingsError(f"timeout must be a number of seconds from 1 to 3600, not {timeout!r}")
    examination = Examination(timeout, num_proc=num_proc, store=store, storage_options=storage_options)

    def look() -> None:
        examination.look_here()
        examination.look_at(spark)

    # on a thread: a JVM that hangs answers none of the questions that have no timeout
    if not within(timeout + 2.0, look):
        fix = "Spark's driver JVM may hang: its thread dump (jstack) and log tell"
        examination.add(Finding("deadline", PROBLEM, f"the checkup did not end within {timeout:.0f} s", fix))
    return examination.report()
