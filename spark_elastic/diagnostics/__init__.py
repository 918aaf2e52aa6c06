"""The doctor: checks whether a cluster is fit for training, and says what to do where it is not.

`examination` runs the checks, which try what jobs use with a job; `findings` has what they return.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from spark_elastic.diagnostics.findings import Finding, Report
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.settings import whole_number
from spark_elastic.wire.ports import valid_ports

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

    if num_proc is not None:
        num_proc = whole_number("num_proc", num_proc, at_least=1)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 1 <= timeout <= 3600:
        raise InvalidSettingsError(f"timeout must be a number of seconds from 1 to 3600, not {timeout!r}")
    for name, value in (("driver_port", driver_port), ("agent_ports", agent_ports)):
        if value is not None:
            valid_ports(name, value)
    examination = Examination(
        timeout,
        num_proc=num_proc,
        store=store,
        storage_options=storage_options,
        driver_port=driver_port,
        agent_ports=agent_ports,
    )
    examination.run(contextlib.nullcontext(spark))
    return examination.report()
