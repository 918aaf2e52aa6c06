"""What a set's content is addressed by: the query, its inputs as they are now, and what was asked for.

Two DataFrames get one key only if writing either would store the same rows. Where that cannot be told, there is none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import unquote, urlsplit
from zoneinfo import ZoneInfo

from spark_elastic.data.layout import LAYOUT_VERSION
from spark_elastic.data.spark_jobs import setting

_REMOTE_FILES = 2000
"""Asked for one by one over py4j, about 1 ms each."""
_SPARKS_OWN = "org.apache.spark.sql.execution.datasources."
"""File indexes whose rows are those of their files. A Delta table, say, may have deleted some without touching any."""
_FUNCTIONS = ("PYTHON_UDF", "SCALA_UDF")
_OPAQUE = ("DeserializeToObject", "HiveSimpleUDF", "HiveGenericUDF", "ScalaUDAF", "ScalaAggregator")

# What may be in a query whose rows another program finds again: its text and structure tell all that it does, and its
# rows do not depend on how they were divided over tasks. A sample, a limit, a window or collect_list is known only
# within the session.
_EXPRESSIONS = "org.apache.spark.sql.catalyst.expressions."
_PLANS = "org.apache.spark.sql.catalyst.plans.logical."
_PLAIN_PLANS = frozenset(
    {
        *("Project", "Filter", "Join", "Union", "Aggregate", "Sort", "Distinct", "Expand", "Generate", "Range"),
        *("Repartition", "RepartitionByExpression", "RebalancePartitions", "SubqueryAlias", "View", "OneRowRelation"),
    }
)
_PLAIN_AGGREGATES = frozenset(
    {
        *("AggregateExpression", "Sum", "Count", "Min", "Max", "Average", "StddevSamp", "StddevPop", "VarianceSamp"),
        *("VariancePop", "BoolAnd", "BoolOr", "Corr", "CovSample", "CovPopulation", "Skewness", "Kurtosis"),
    }
)
_HIDING = frozenset(
    {
        *("PythonUDF", "PythonUDAF", "PythonUDTF", "PythonFuncExpression", "ScalaUDF", "ApplyFunctionExpression"),
        *("CallMethodViaReflection", "TryEval", "UserDefinedGenerator", "DistributedSequenceID"),
        "InSet",
    }
)
"""Expressions whose text has only the name of the code that they run, or not even that; and a long IN, whose text does
not tell the value 'a, b' from two values."""
_NO_MATTER = (
    "spark.sql.warehouse.dir",
    "spark.sql.debug.",
    "spark.sql.maxPlanStringLength",
    "spark.sql.execution.arrow.",
    "spark.sql.ui.",
)
"""Settings, or what they begin with, that no row depends on: programs differ in them, and threads of ours set some."""
_TRYING = re.compile(r"\btry_\w+\(")
_PROCESS = uuid.uuid4().hex
"""With the application's id, which two programs of one millisecond can have in common: the session."""


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
    if plan.containsPattern(patterns.PLAN_EXPRESSION()):
        return Identity(None, "the query has a subquery, and what that reads is not looked at")
    conf = _settings(spark)
    zone = str(spark.conf.get("spark.sql.session.timeZone"))
    text, structure = _text(spark, plan), _structure(plan, zone)
    of_session = of_session or structure is None or any(name in text for name in _OPAQUE)
    # try_add(a, b) is replaced by an addition whose text does not say that it tries
    of_session = of_session or bool(_TRYING.search(_text(spark, execution.analyzed(), canonical=False).lower()))
    leaves: list[Any] = []
    in_memory = False
    found = plan.collectLeaves()
    for number in range(found.size()):
        leaf = found.apply(number)
        kind = str(leaf.nodeName()).split()[0]
        if kind == "LogicalRelation" and leaf.relation().getClass().getSimpleName() == "HadoopFsRelation":
            relation = leaf.relation()
            index = str(relation.location().getClass().getName())
            if not index.startswith(_SPARKS_OWN):
                return Identity(None, f"rows may be gone from the files of {index} without a change of the files")
            files = _fingerprints(spark, relation.location().inputFiles())
            if files is None:
                return Identity(None, f"more than {_REMOTE_FILES} files to ask for")
            leaves.append(["files", *_read_as(relation), files])
            continue
        in_memory = True
        if kind == "LogicalRDD" or leaf.getClass().getSimpleName() == "LogicalRDD":
            leaves.append(["rdd", leaf.rdd().id()])
        elif leaf.getClass().getSimpleName() == "InMemoryRelation":
            leaves.append(["cached", leaf.cacheBuilder().cachedColumnBuffers().id()])
        elif kind == "LocalRelation":
            leaves.append(["local", leaf.hashCode(), leaf.data().size()])
        elif kind in ("Range", "OneRowRelation"):
            in_memory = False
            leaves.append([kind])
        else:
            return Identity(None, f"whether {kind} still holds the same rows cannot be told")
        of_session = of_session or in_memory
    facts: dict[str, Any] = {
        "text": text,
        "structure": structure,
        "schema": df.schema.json(),
        "leaves": leaves,
        "spark": spark.version,
        "settings": conf,
        "time_zone": zone,
        "ansi": spark.conf.get("spark.sql.ansi.enabled"),
    }
    if of_session:
        # The hash knows functions by where they lie in this JVM's memory, which tells two of one name apart.
        facts["session"] = [spark.sparkContext.applicationId, _PROCESS, plan.semanticHash()]
    return Identity(facts)


def _settings(spark: Any) -> list[list[str]]:
    """All settings of Spark SQL that were made, sorted."""
    every = spark._jsparkSession.conf().getAll().iterator()
    made = []
    while every.hasNext():
        pair = every.next()
        name = str(pair._1())
        if name.startswith("spark.sql.") and not name.startswith(_NO_MATTER):
            made.append([name, str(pair._2())])
    return sorted(made)


def _text(spark: Any, plan: Any, canonical: bool = True) -> str:
    # or the 26th literal would be missing, and the end of a long text
    with (
        setting(spark, "spark.sql.debug.maxToStringFields", "1000000"),
        setting(spark, "spark.sql.maxPlanStringLength", "2147483632"),
    ):
        return str((plan.canonicalized() if canonical else plan).toString())


def _structure(plan: Any, zone: str) -> list[Any] | None:
    """The plan as a tree with the types and values of literals, which its text leaves to be guessed.

    zone: in which Spark writes moments down.
    None: something in it runs code that is not in the plan, or its rows depend on how they are divided over tasks, or a
    literal is not told by how it is written.
    """
    try:
        tree = json.loads(plan.canonicalized().toJSON())
    except Exception:  # py4j's: some expressions cannot be written so
        return None
    return tree if _is_plain(tree, zone) else None


def _is_plain(tree: Any, zone: str) -> bool:
    """Whether all nodes are of the kinds that are known to say what they do. Drops what names this JVM."""
    if isinstance(tree, list):
        return all(_is_plain(each, zone) for each in tree)
    if not isinstance(tree, dict):
        return True
    tree.pop("jvmId", None)
    name = str(tree.get("class", ""))
    if name == _EXPRESSIONS + "Literal" and not _is_told(tree, zone):
        return False
    return _is_known(name) and all(_is_plain(each, zone) for each in tree.values())


def _is_told(literal: dict[str, Any], zone: str) -> bool:
    """Whether only one value is written like this one.

    An array, map or struct of 'a,b' and 'c' is written like one of 'a' and 'b,c', and 01:30 comes twice in the night in
    which clocks are put back.
    """
    kind, text = literal.get("dataType"), literal.get("value")
    if kind != "timestamp" or text is None:
        return isinstance(kind, str) and kind != "variant"
    if re.fullmatch(r"UTC|GMT|Z|Etc/UTC|(UTC|GMT|UT)?[+-][\d:]+", zone):
        return True
    try:
        here, at = ZoneInfo(zone), datetime.fromisoformat(str(text))
    except (ValueError, LookupError, OSError):  # a zone that only Java knows, for one
        return False
    return at.replace(tzinfo=here).utcoffset() == at.replace(tzinfo=here, fold=1).utcoffset()


def _is_known(name: str) -> bool:
    if name.startswith(_EXPRESSIONS):
        package, _, short = name.removeprefix(_EXPRESSIONS).rpartition(".")
        if package == "aggregate":
            return short in _PLAIN_AGGREGATES
        return package in ("", "codegen", "xml", "json", "csv", "variant") and short not in _HIDING
    if name.startswith(_PLANS):
        return name.removeprefix(_PLANS) in _PLAIN_PLANS
    return name in ("", "org.apache.spark.sql.catalyst.optimizer.NormalizeNaNAndZero", _SPARKS_OWN + "LogicalRelation")


def _read_as(relation: Any) -> list[Any]:
    """How Spark makes rows of the files: format, schemas, options."""
    options, every = {}, relation.options().iterator()
    while every.hasNext():
        pair = every.next()
        options[str(pair._1())] = str(pair._2())
    return [
        str(relation.fileFormat().getClass().getName()),
        str(relation.dataSchema().json()),
        str(relation.partitionSchema().json()),
        sorted(options.items()),
    ]


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
