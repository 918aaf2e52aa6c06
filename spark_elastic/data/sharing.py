"""One question before training: do the executors see the same files as the driver?"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from typing import Any

from spark_elastic.data.spark_jobs import named
from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError

PROBE = "probe-"
"""Begins the name of a folder that is there for a moment, straight in the store, so that nothing is left behind."""


_known: set[tuple[str, str]] = set()
"""(application, URL) of the stores that were found to be shared."""


def ensure_shared(store: Store, context: Any) -> None:
    """`check_shared`, once for each application and store. context: a SparkContext."""
    about = (context.applicationId, store.url)
    if about not in _known:
        check_shared(store, context)
        _known.add(about)


def check_shared(store: Store, context: Any) -> None:
    """The driver writes a token, every executor reads it and writes one of its own, the driver reads those.

    A short job with as many tasks as there are slots, so an executor that is busy with something else is not asked.

    Raises: StoreError: naming the hosts that do not see the driver's file, or whose file the driver does not see.
    """
    token = uuid.uuid4().hex
    folder = f"{PROBE}{token}"
    try:
        store.write_bytes(f"{folder}/driver", token.encode())
    except Exception as error:  # each filesystem has errors of its own
        raise StoreError(f"the driver cannot write to {store.url}: {error}", url=store.url) from error
    try:
        if store.is_local and (context.master == "local" or context.master.startswith("local[")):
            return  # all of it runs on this machine, as this user
        tasks = context.defaultParallelism
        rows = context.parallelize(range(tasks), tasks).mapPartitionsWithIndex(_probe(store, folder, token))
        with named(context, f"spark_elastic: do all executors see {store.url}"):
            answers = context.runJob(rows, list)
        problems = {host: complaint for host, _, complaint in answers if complaint}
        for host, file, complaint in answers:
            if not complaint and not store.exists(f"{folder}/{file}"):
                problems[host] = "wrote a file that the driver does not see"
        if problems:
            told = "; ".join(f"{host} {complaint}" for host, complaint in sorted(problems.items()))
            raise StoreError(
                f"the driver on {socket.gethostname()} and the executors do not share {store.url}: {told}. Name a "
                "store that all of them see: store= a mounted folder (NFS, /dbfs, /Volumes) or an hdfs://, s3://, "
                "gs:// or abfs:// URI",
                url=store.url,
            )
    finally:
        store.delete(folder)


def _probe(store: Store, folder: str, token: str) -> Any:
    def probe(index: int, _rows: Iterator[int]) -> Iterator[tuple[str, str, str]]:
        file = f"executor-{index}"
        complaint = ""
        try:
            if store.read_bytes(f"{folder}/driver") != token.encode():
                complaint = "reads another file in its place"
            else:
                store.write_bytes(f"{folder}/{file}", token.encode())
        except FileNotFoundError:
            complaint = "does not see the driver's file"
        except Exception as error:  # each filesystem has errors of its own
            complaint = f"cannot use it ({type(error).__name__}: {error})"
        yield socket.gethostname(), file, complaint

    return probe
