"""The key of a dataset: a hash of the query, the current state of its inputs, and the settings.

Two DataFrames have the same key only if writing them would store the same rows. If that cannot be known, a DataFrame
has no key, and its dataset is not reused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import unquote, urlsplit
from zoneinfo import ZoneInfo

from spark_elastic.data.manifest import LAYOUT_VERSION
from spark_elastic.data.spark_connect import is_connect
from spark_elastic.data.spark_jobs import setting

_REMOTE_FILES = 2000  # the most remote files of a query. Each costs a call over py4j, about 1 ms
_SPARKS_OWN = "org.apache.spark.sql.execution.datasources."
"""The package of file indexes that return all rows of their files. A Delta table, for example, may delete rows without
changing a file."""
_FUNCTIONS = ("PYTHON_UDF", "SCALA_UDF")
_OPAQUE = ("DeserializeToObject", "HiveSimpleUDF", "HiveGenericUDF", "ScalaUDAF", "ScalaAggregator")

# Nodes of queries whose datasets other programs may reuse: their text and structure define the rows, which do not
# depend on the division into tasks. Datasets of a sample, limit, window or collect_list are reused in the session only.
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
"""Expressions whose text has at most the name of the code that they run; and InSet, a long IN, whose text is the same
for the value 'a, b' as for two values."""
_IRRELEVANT = (
    "spark.sql.warehouse.dir",
    "spark.sql.debug.",
    "spark.sql.maxPlanStringLength",
    "spark.sql.execution.arrow.",
    "spark.sql.ui.",
)
"""Prefixes of settings that do not change any row: programs differ in them, and this package sets some itself."""
_TRYING = re.compile(r"\btry_\w+\(")
_PROCESS = uuid.uuid4().hex
"""Distinguishes sessions, with the application's id, which two programs that start in one millisecond can share."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything that the rows of a DataFrame depend on."""

    facts: Mapping[str, Any] | None  # plain values. None: they cannot be known
    reason: str = ""  # why they cannot be known


def key_of(*parts: object) -> str:
    """Hash plain values to 32 hexadecimal digits."""
    text = json.dumps([LAYOUT_VERSION, *parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def identify(df: Any) -> Identity:
    """Return what the rows of a DataFrame depend on; no facts if Spark cannot be asked."""
    if is_connect(df):
        return Identity(None, "Spark Connect does not show the plan of a query; dataset_id= names the rows instead")
    try:
        return _identify(df)
    except Exception as error:  # of py4j or pyspark: the JVM side of a query is not a public interface
        return Identity(None, f"Spark's plan of the query could not be read: {error}")


def _identify(df: Any) -> Identity:
    """Read the plan of the query.

    Plans of files and built-in functions mean the same in every session. Data in Spark's memory and functions of the
    user are identified by names of this session, so the facts then include the session.
    """
    spark = df.sparkSession
    # Cached data is computed once, so even rand() in it is harmless. `select` makes a new DataFrame, because Spark
    # looks for cached data only once per DataFrame.
    execution = df.select("*")._jdf.queryExecution()
    plan = execution.withCachedData()
    if not plan.deterministic():
        return Identity(None, "the query is not deterministic; cache() the DataFrame to reuse its rows")
    patterns = spark.sparkContext._jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    if plan.containsPattern(patterns.CURRENT_LIKE()):
        return Identity(None, "the query depends on the time")
    of_session = any(plan.containsPattern(getattr(patterns, name)()) for name in _FUNCTIONS)
    plan = execution.optimizedPlan()  # without columns that are not read
    if plan.containsPattern(patterns.PLAN_EXPRESSION()):
        return Identity(None, "the query has a subquery, whose inputs are not examined")
    # all settings of Spark SQL that have been set and may change rows
    conf = sorted(
        [name, value]
        for name, value in _pairs(spark._jsparkSession.conf().getAll())
        if name.startswith("spark.sql.") and not name.startswith(_IRRELEVANT)
    )
    zone = str(spark.conf.get("spark.sql.session.timeZone"))
    text, structure = _text(spark, plan), _structure(plan, zone)
    of_session = of_session or structure is None or any(name in text for name in _OPAQUE)
    # the plan has an ordinary addition in place of try_add(a, b)
    of_session = of_session or bool(_TRYING.search(_text(spark, execution.analyzed(), canonical=False).lower()))
    leaves: list[Any] = []
    found = plan.collectLeaves()
    for number in range(found.size()):
        leaf = found.apply(number)
        kind = str(leaf.nodeName()).split()[0]
        if kind == "LogicalRelation" and leaf.relation().getClass().getSimpleName() == "HadoopFsRelation":
            relation = leaf.relation()
            index = str(relation.location().getClass().getName())
            if not index.startswith(_SPARKS_OWN):
                return Identity(None, f"rows of {index} may be deleted without a change of the files")
            files = _fingerprints(spark, relation.location().inputFiles())
            if files is None:
                return Identity(None, f"the query reads more than {_REMOTE_FILES} remote files")
            leaves.append(
                [
                    "files",
                    str(relation.fileFormat().getClass().getName()),
                    str(relation.dataSchema().json()),
                    str(relation.partitionSchema().json()),
                    sorted(_pairs(relation.options())),
                    files,
                ]
            )
            continue
        if kind == "LogicalRDD" or leaf.getClass().getSimpleName() == "LogicalRDD":
            leaves.append(["rdd", leaf.rdd().id()])
        elif leaf.getClass().getSimpleName() == "InMemoryRelation":
            leaves.append(["cached", leaf.cacheBuilder().cachedColumnBuffers().id()])
        elif kind == "LocalRelation":
            leaves.append(["local", leaf.hashCode(), leaf.data().size()])
        elif kind in ("Range", "OneRowRelation"):
            leaves.append([kind])
        else:
            return Identity(None, f"it cannot be known whether the rows of {kind} have changed")
        of_session = of_session or kind not in ("Range", "OneRowRelation")  # the others are in Spark's memory
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
        # this hash includes the addresses of functions in the JVM, which distinguish two of the same name
        facts["session"] = [spark.sparkContext.applicationId, _PROCESS, plan.semanticHash()]
    return Identity(facts)


def _pairs(scala_map: Any) -> Iterator[tuple[str, str]]:
    every = scala_map.iterator()
    while every.hasNext():
        pair = every.next()
        yield str(pair._1()), str(pair._2())


def _text(spark: Any, plan: Any, canonical: bool = True) -> str:
    # by default the text leaves out literals after the 25th, and ends after some length
    with (
        setting(spark, "spark.sql.debug.maxToStringFields", "1000000"),
        setting(spark, "spark.sql.maxPlanStringLength", "2147483632"),
    ):
        return str((plan.canonicalized() if canonical else plan).toString())


def _structure(plan: Any, zone: str) -> list[Any] | None:
    """Return the plan as a tree with the types and values of literals, which its text leaves open.

    None: the plan runs code that is not in it, or its rows depend on the division into tasks, or the text of a literal
    is ambiguous; `zone` is the time zone of timestamps.
    """
    try:
        tree = json.loads(plan.canonicalized().toJSON())
    except Exception:  # of py4j: some expressions have no JSON
        return None
    return tree if _is_plain(tree, zone) else None


def _is_plain(tree: Any, zone: str) -> bool:
    """Return whether the JSON of all nodes defines their rows, and remove the ids of this JVM from it."""
    if isinstance(tree, list):
        return all(_is_plain(each, zone) for each in tree)
    if not isinstance(tree, dict):
        return True
    tree.pop("jvmId", None)
    name = str(tree.get("class", ""))
    if name == _EXPRESSIONS + "Literal" and not _is_unambiguous(tree, zone):
        return False
    return _is_known(name) and all(_is_plain(each, zone) for each in tree.values())


def _is_unambiguous(literal: dict[str, Any], zone: str) -> bool:
    """Return whether no other literal has this text.

    An array, map or struct of 'a,b' and 'c' has the text of one of 'a' and 'b,c', and 01:30 occurs twice in the night
    in which clocks are set back.
    """
    kind, text = literal.get("dataType"), literal.get("value")
    if kind != "timestamp" or text is None:
        return isinstance(kind, str) and kind != "variant"
    if re.fullmatch(r"UTC|GMT|Z|Etc/UTC|(UTC|GMT|UT)?[+-][\d:]+", zone):
        return True
    try:
        here, at = ZoneInfo(zone), datetime.fromisoformat(str(text))
    except (ValueError, LookupError, OSError):  # for example a zone that only Java knows
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


def _fingerprints(spark: Any, files: Iterable[str]) -> list[tuple[str, int, int]] | None:
    """Return (URI, bytes, modification time) of each file, sorted; None: there are too many."""
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
