"""Whether the executors and the driver see each other's files in a store: a short Spark job finds out."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from typing import Any

from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError
from spark_elastic.spark.cluster import Cluster

PROBE = "probe-"  # starts the name of the folder that a check makes in a store for a moment


def ensure_shared(store: Store, cluster: Cluster) -> None:
    """Check that the executors and the driver see each other's files, with a short job once per application and store.

    The driver writes a token, each task reads it and writes its own file, and the driver looks for these files. The job
    has as many tasks as Spark has slots, so an executor that is busy with other tasks may be left out. Raise StoreError
    if hosts do not see the driver's file, or the driver does not see theirs.
    """
    about = ("store", cluster.application, store.address)
    if about in cluster.done:
        return
    cluster.check_executors()
    token = uuid.uuid4().hex
    folder = f"{PROBE}{token}"

    def probe(_rows: Iterator[Any]) -> Iterator[tuple[str, str, str]]:
        from pyspark import TaskContext

        context = TaskContext.get()
        file = f"executor-{0 if context is None else context.partitionId()}"
        problem = ""
        try:
            if store.read_bytes(f"{folder}/driver") != token.encode():
                problem = "reads another file in its place"
            else:
                store.write_bytes(f"{folder}/{file}", token.encode())
        except FileNotFoundError:
            problem = "does not see the driver's file"
        except Exception as error:  # each filesystem has its own exceptions
            problem = f"cannot use it ({type(error).__name__}: {error})"
        yield socket.gethostname(), file, problem

    try:
        store.write_bytes(f"{folder}/driver", token.encode())
    except Exception as error:  # each filesystem has its own exceptions
        raise StoreError(f"the driver cannot write to {store.url}: {error}") from error
    try:
        name = f"spark_elastic: check that all executors see {store.url}"
        is_one_machine = store.is_local and cluster.is_local
        answers = [] if is_one_machine else cluster.start_tasks(probe, None, name).result()
        problems = {host: problem for host, _, problem in answers if problem}
        for host, file, problem in answers:
            if not problem and not store.exists(f"{folder}/{file}"):
                problems[host] = "wrote a file that the driver does not see"
        if problems:
            listed = "; ".join(f"{host} {problem}" for host, problem in sorted(problems.items()))
            raise StoreError(
                f"the driver on {socket.gethostname()} and the executors do not share {store.url}: {listed}. Name "
                "a store that all of them see: store= a mounted folder (NFS, /dbfs, /Volumes) or an hdfs://, "
                "s3://, gs:// or abfs:// URI"
            )
    finally:
        store.delete(folder)
    cluster.done.add(about)
