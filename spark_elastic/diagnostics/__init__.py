"""The doctor: checks whether a cluster is fit for training, and says what to do where it is not.

`examination` runs the checks, which try what jobs use with a job; `findings` has what they return.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from spark_elastic.diagnostics.findings import Finding, Report

__all__ = ["Finding", "Report", "doctor"]


def doctor(
    spark: Any = None,
    *,
    store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    driver_port: int | str | None = None,
    agent_ports: int | str | None = None,
    timeout: float = 120.0,
) -> Report:
    """Check this machine, the Spark session and its executors; report problems with their remedies.

    Runs a job of one all-reduce, whose workers tell their versions and their time, and a Spark job in which the
    executors and the driver read each other's files in the store.

    Args:
        spark: a SparkSession or SparkContext. Default: the active one.
        store: the folder or URI in which estimators are to keep their data; default: theirs, a temporary folder.
        storage_options: for `store`, as in estimators.
        num_proc: workers that are to train, and of the job. Default: one for each slot, at most 32.
        driver_port: as in `run`.
        agent_ports: as in `run`.
        timeout: seconds for the whole check-up, even if Spark or an executor hangs.

    Returns:
        A `Report`: `print` it, let a notebook show it, or read `ok`, `findings` and `to_json()`.

    Raises:
        InvalidSettingsError: `num_proc`, a port or `timeout` is out of range.
    """
    from spark_elastic.diagnostics.examination import Examination

    examination = Examination(timeout, num_proc, store, storage_options, driver_port, agent_ports)
    examination.run(contextlib.nullcontext(spark), "this machine", "the session")
    return examination.report()
