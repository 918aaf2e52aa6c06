"""What a set's content is addressed by: the query, its inputs as they are now, and what was asked for.

Two DataFrames get one key only if writing either would store the same rows. Where that cannot be told, there is none.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from spark_elastic.data.layout import LAYOUT_VERSION
from spark_elastic.data.session_settings import setting

_REMOTE_FILES = 2000
"""Asked for one by one over py4j, about 1 ms each."""
_SPARKS_OWN = "org.apache.spark.sql.execution.datasources."
"""File indexes whose rows are those of their files. A Delta table, say, may have deleted some without touching any."""
_FUNCTIONS = ("PYTHON_UDF", "SCALA_UDF")
_OPAQUE = ("DeserializeToObject", "HiveSimpleUDF", "HiveGenericUDF", "ScalaUDAF", "ScalaAggregator")


@dataclass(frozen=True, slots=True)
class Identity:
    """facts: what the rows depend on; None: it cannot be told, and `reason` says why."""

    facts: Mapping[str, Any] | None
    reason: str = ""


def key_of(*parts: object) -> str:
    """32 hexadecimal digits."""
    text = json.dumps([LAYOUT_VERSION, *parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def identify(df: Any) -> Identity:
    """What the rows of a DataFrame depend on; nothing is known if this version of Spark cannot be asked."""
    try:
        return _identify(df)
    except Exception as error:  # py4j's, or pyspark's: the JVM's side of a query is not a public interface
        return Identity(None, f"Spark could not be asked: {error}")


def _identify(df: Any) -> Identity:
    """Plans of files and built-in functions alone mean the same in every session. What Spark holds in memory, and every
    function of the user, is known by what it is called in this session, so the facts then name the session.
    """
    spark = df.sparkSession
    # What is cached is computed once, so not even rand() in it matters. A new DataFrame, for Spark looks into the cache
    # once for each.
    execution = df.select("*")._jdf.queryExecution()
    plan = execution.withCachedData()
    if not plan.deterministic():
        return Identity(None, "the query is not deterministic; cache() it to have its rows re-used")
    patterns = spark.sparkContext._jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    if plan.containsPattern(patterns.CURRENT_LIKE()):
        return Identity(None, "the query depends on the time")
    of_session = any(plan.containsPattern(getattr(patterns, name)()) for name in _FUNCTIONS)
    plan = execution.optimizedPlan()  # columns that nobody asked for are gone from it
    text = _text(spark, plan)
    of_session = of_session or any(name in text for name in _OPAQUE)
    leaves: list[Any] = []
    found = plan.collectLeaves()
    for number in range(found.size()):
        leaf = found.apply(number)
        kind = str(leaf.nodeName()).split()[0]
        if kind == "LogicalRelation" and leaf.relation().getClass().getSimpleName() == "HadoopFsRelation":
            index = str(leaf.relation().location().getClass().getName())
            if not index.startswith(_SPARKS_OWN):
                return Identity(None, f"rows may be gone from the files of {index} without a change of the files")
            continue
        if kind == "LogicalRDD" or leaf.getClass().getSimpleName() == "LogicalRDD":
            leaves.append(["rdd", leaf.rdd().id()])
        elif leaf.getClass().getSimpleName() == "InMemoryRelation":
            leaves.append(["cached", leaf.cacheBuilder().cachedColumnBuffers().id()])
        elif kind == "LocalRelation":
            leaves.append(["local", leaf.hashCode()])
        elif kind not in ("Range", "OneRowRelation"):
            return Identity(None, f"whether {kind} still holds the same rows cannot be told")
    files = _fingerprints(spark, df.inputFiles())
    if files is None:
        return Identity(None, f"more than {_REMOTE_FILES} files to ask for")
    conf = spark.conf
    facts = {
        "plan": plan.semanticHash(),
        "text": text,
        "schema": df.schema.json(),
        "files": files,
        "session": spark.sparkContext.applicationId if of_session or leaves else "",
        "leaves": leaves,
        "time_zone": conf.get("spark.sql.session.timeZone"),
        "ansi": conf.get("spark.sql.ansi.enabled"),
    }
    return Identity(facts)


def _text(spark: Any, plan: Any) -> str:
    with setting(spark, "spark.sql.debug.maxToStringFields", "1000000"):  # or the 26th literal would be missing
        return str(plan.canonicalized().toString())


def _fingerprints(spark: Any, files: Iterable[str]) -> list[tuple[str, int, int]] | None:
    """(URI, bytes, time of change) of each file, sorted; None: too many."""
    found, remote = [], []
    for uri in files:
        parts = urlsplit(uri)
        try:
            status = os.stat(unquote(parts.path)) if parts.scheme in ("file", "") else None
        except OSError:
            status = None
        if status is None:
            remote.append(uri)
        else:
            found.append((uri, status.st_size, status.st_mtime_ns))
    if len(remote) > _REMOTE_FILES:
        return None
    context = spark.sparkContext
    for uri in remote:
        path = context._jvm.org.apache.hadoop.fs.Path(context._jvm.java.net.URI(uri))
        entry = path.getFileSystem(context._jsc.hadoopConfiguration()).getFileStatus(path)
        found.append((uri, int(entry.getLen()), int(entry.getModificationTime())))
    return sorted(found)
