"""A program that writes a kept dataset and prints the keys of several queries: python -m ... FOLDER."""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from spark_elastic.data.materialization import materialize
from spark_elastic.data.reuse import identify, key_of


def queries(spark: Any, folder: str) -> dict[str, Any]:
    table = spark.read.parquet(f"{folder}/table")
    other = spark.read.parquet(f"{folder}/other")
    csv = spark.read.schema("x long, text string")
    text = F.col("x").cast("string")
    letters = ["a", *"cdefghijklmnop"]
    doubled = F.udf(lambda x: 2 * x, "long")
    moment = F.timestamp_seconds("x")
    return {
        "filter": table.filter("x > 10").withColumn("y", F.col("x") * 2 + 1.5),
        "filter of another number": table.filter("x > 11").withColumn("y", F.col("x") * 2 + 1.5),
        "range": spark.range(10),
        "longer range": spark.range(11),
        "join": table.join(other, "x").select(table.v, other.x),
        "join the other way round": other.join(table, "x").select(other.v, table.x),
        "sums": table.groupBy("v").agg(F.sum("x").alias("s")),
        "csv": csv.csv(f"{folder}/csv"),
        "csv with a header": csv.option("header", True).csv(f"{folder}/csv"),
        "one literal": table.select(F.concat_ws("-", text, F.lit("x, y"))),
        "two literals": table.select(F.concat_ws("-", text, F.lit("x"), F.lit("y")).alias("concat_ws(-, x, x, y)")),
        # reused within the session only, or never
        "session: tried addition": table.selectExpr("coalesce(try_add(x, 1), 0) AS x"),
        "session: addition": table.selectExpr("coalesce(x + 1, 0) AS x").limit(100),
        "session: tried cast": table.select(F.coalesce(text.try_cast("int"), F.lit(0)).alias("x"))
        if hasattr(type(text), "try_cast")  # a Column has every attribute
        else table.selectExpr("coalesce(try_cast(cast(x as string) as int), 0) AS x"),
        "few values": table.where(F.col("x").isin([1, 2, 3])),
        "session: many values": csv.csv(f"{folder}/csv").where(F.col("text").isin([*letters, "a, b"])),
        "session: many other values": csv.csv(f"{folder}/csv").where(F.col("text").isin(["a, a", "b", *letters[1:]])),
        # literals with the same text: the map of 'a,b' and 'c', and the hour that occurs twice when clocks are set back
        "session: map": table.select(_chosen({"a,b": 1, "c": 2}, text)),
        "session: other map": table.select(_chosen({"a": 1, "b,c": 2}, text)),
        "session: array": table.where(F.array_contains(F.array(F.lit("1,2"), F.lit("3")), text)),
        "session: other array": table.where(F.array_contains(F.array(F.lit("1"), F.lit("2,3")), text)),
        "moment": table.where(moment > F.timestamp_seconds(F.lit(1730604600))),
        "session: half past one": table.where(moment > F.timestamp_seconds(F.lit(1730611800))),
        "session: half past one again": table.where(moment > F.timestamp_seconds(F.lit(1730615400))),
        "session: function": table.select(doubled("x")),
        "session: sample": table.sample(0.5, seed=3),
        "session: limit": table.limit(5),
        "session: lists": table.groupBy("v").agg(F.collect_list("x")),
        "session: in memory": spark.createDataFrame([(1,)], "x int"),
        "never: random": table.select(F.rand(1)),
        "never: random function": table.select(doubled.asNondeterministic()("x")),
        "never: subquery": table.selectExpr(f"(SELECT max(x) FROM parquet.`{folder}/other`) AS x"),
    }


def _chosen(values: dict[str, int], key: Any) -> Any:
    return F.create_map(*(F.lit(each) for pair in values.items() for each in pair))[key].alias("x")


def main(folder: str) -> None:
    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", False).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    keys = {}
    for name, query in queries(spark, folder).items():
        facts = identify(query).facts
        keys[name] = None if facts is None else key_of(facts)
    first = queries(spark, folder)["filter"]
    dataset = materialize(first, {"y": "y"}, store=f"{folder}/store", keep=True, verbose=0)
    print(json.dumps({"keys": keys, "set": dataset.store.url, "rows": dataset.rows()}))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
