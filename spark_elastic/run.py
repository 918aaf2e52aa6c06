"""`run` and `run_async`: an elastic job from a function. The composition root: everything is put together here."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from spark_elastic.driver.elastic_driver import ElasticDriver, EventSource
from spark_elastic.driver.local_launcher import LocalLauncher
from spark_elastic.driver.output import OutputPrinter
from spark_elastic.driver.preflight import pickled
from spark_elastic.job import ElasticJob
from spark_elastic.settings import ElasticSettings
from spark_elastic.wire.framing import new_key
from spark_elastic.wire.handover import AgentOrder

_job_numbers = itertools.count(1)


def local_job(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    launcher: LocalLauncher,
    settings: ElasticSettings,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    sources: Sequence[EventSource] = (),
    bind: str = "127.0.0.1",
) -> ElasticJob:
    function = pickled(fn, tuple(args), kwargs)
    listening = socket.create_server((bind, 0), backlog=1024)
    name = f"{os.getpid()}-{next(_job_numbers)}"
    order = AgentOrder(
        job=name,
        driver_addresses=((bind, listening.getsockname()[1]),),
        key=new_key(),
        function=function,
        connect_timeout_s=min(settings.start_timeout_s, 60.0),
        env=dict(env or {}),
    )
    printer = OutputPrinter(stdout, stderr)
    driver = ElasticDriver(
        order,
        settings,
        lambda on_ended: launcher.bind(order, on_ended),
        listening,
        sources=sources,
        printer=printer,
        verbose=verbose,
    )

    def clean_up() -> None:
        listening.close()
        printer.close()

    return ElasticJob(name, driver, lambda: None, clean_up)
