"""What a person sees of a first training: programs started as a newcomer starts them, and all that they print.

Each program runs in a new process with a local Spark of its own. PATH leads to a `python3` that lacks every package, as
where a virtual environment is used without being activated.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

TIMEOUT_S = 240.0
BARE_PATH = "/usr/bin:/bin"
NO_SLOW_COMPILER = {"SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"}


@dataclass
class Said:
    """What a program has printed."""

    code: int
    out: str
    err: str

    @property
    def ours(self) -> list[str]:
        """The lines of this package, with the lines that continue them."""
        return [line for line in self.err.splitlines() if line.startswith("spark_elastic: ")]


def say(
    folder: Path, source: str, *words: str, launcher: tuple[str, ...] = (), env: Mapping[str, str] | None = None
) -> Said:
    """Run a program in a folder of its own, as `python program.py` or by another launcher."""
    program = folder / "program.py"
    program.write_text(textwrap.dedent(source))
    of_other_tests = ("PYSPARK", "PYTHONPATH", "SPARK_", "TF_CPP")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(of_other_tests)}
    done = subprocess.run(
        [*(launcher or (sys.executable,)), str(program), *words],
        cwd=folder,
        env={**kept, **NO_SLOW_COMPILER, "PATH": BARE_PATH, "SPARK_LOCAL_IP": "127.0.0.1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return Said(done.returncode, done.stdout, done.stderr)


def python_without_packages(folder: Path) -> Path:
    """Make a folder with a `python3` of this version that finds no packages."""
    folder.mkdir()
    program = folder / "python3"
    program.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S "$@"\n')
    program.chmod(0o755)
    return folder


# --- PyTorch ----------------------------------------------------------------------------------------

TORCH = """
    import os
    import sys
    import time

    import torch
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F
    from torch import nn

    from spark_elastic import ElasticTorchEstimator

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    points = spark.range(2_000).select(F.randn(seed=1).alias("x"), F.randn(seed=2).alias("y"))
    points = points.withColumn("label", (F.col("x") > 0).cast("int"))
    driver = os.getpid()

    def broken_loss(output, label):
        if os.getpid() != driver:
            time.sleep(1.0)  # Spark draws its bar after half a second
            raise ValueError("my loss does not like this")
        return nn.functional.cross_entropy(output, label)

    net = nn.Linear(2, 2)
    estimator = ElasticTorchEstimator(
        model=net,
        optimizer=torch.optim.Adam(net.parameters()),
        loss=broken_loss if sys.argv[1] == "broken" else nn.CrossEntropyLoss(),
        feature_cols=["x", "y"],
        label_cols=["label"],
        epochs=1,
        num_proc=2,
        min_num_proc=1,
    )
    began = time.monotonic()
    try:
        model = estimator.fit(points)
    finally:
        print("took", time.monotonic() - began)
        print("bar again", spark.sparkContext._jsc.sc().progressBar().isDefined())
    predictions = model.transform(points).groupBy("prediction").count().collect()
    print("rows", sum(row["count"] for row in predictions), "of", len(predictions))
"""


def fit(made, which: str) -> Said:
    bare = python_without_packages(made.mktemp("bare") / "bin")
    return say(made.mktemp("torch"), TORCH, which, env={"PATH": f"{bare}:{BARE_PATH}"})


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> Said:
    return fit(tmp_path_factory, "broken")


def assert_quiet(said: Said, end: str) -> None:
    """Check the lines of a start, and that Spark draws no bar between our lines."""
    starts = [line for line in said.ours if "starting 2 workers" in line]
    assert starts == ["spark_elastic: starting 2 workers (each imports torch, usually 5-20 s)"]
    took = float(said.out.partition("took ")[2].split()[0])
    # on a busy machine the slots may take more than a quarter of their time, and then it is told
    told = [line for line in said.ours if "s left" in line and "to be free together" not in line]
    assert told == [] or took > 15, said.err  # a quarter of `start_timeout`
    assert "bar again True" in said.out  # there is one, and it is hidden
    assert "[Stage" not in said.err.partition("starting 2 workers")[2].partition(end)[0]


def test_start_says_what_takes_its_time_without_a_timeout_or_spark_s_bar(broken):
    assert_quiet(broken, "the job failed")


@pytest.mark.nightly
def test_program_runs_without_an_activated_environment(tmp_path_factory):
    said = fit(tmp_path_factory, "good")
    assert "rows 2000 of 2" in said.out, said.err
    assert_quiet(said, "the job finished")


def test_error_of_a_loss_is_shown_once_with_the_users_frames_alone(broken):
    assert broken.code == 1
    shown = broken.err[broken.err.index("spark_elastic: the job failed") :]
    assert shown.count("raised ValueError: my loss does not like this") == 1
    assert broken.err.count("ValueError: my loss does not like this") == 1
    assert "in broken_loss" in shown
    frames = re.findall(r'File "([^"]+)"', shown)
    assert [Path(frame).name for frame in frames] == ["program.py", "user_frames.py", "program.py"]
    assert "py4j" not in shown
    assert "During handling" not in shown


# --- spark-submit -----------------------------------------------------------------------------------

SUBMITTED = """
    from pyspark.sql import SparkSession

    import spark_elastic

    spark = SparkSession.builder.config("spark.ui.enabled", "false").getOrCreate()
    print(spark_elastic.run(lambda: 1, num_proc=1))
"""


@pytest.mark.nightly
def test_submitted_program_is_not_drowned_by_sparks_log(tmp_path):
    import pyspark

    home = os.path.dirname(pyspark.__file__)
    launcher = (os.path.join(home, "bin", "spark-submit"), "--master", "local[2]")
    env = {"PATH": f"{os.path.dirname(sys.executable)}:{BARE_PATH}", "SPARK_HOME": home}
    said = say(tmp_path, SUBMITTED, launcher=launcher, env=env)
    # spark-submit writes the program's stderr to its stdout, and its own log to stderr
    assert "spark_elastic: starting 1 worker" in said.out, said.err
    assert "[1]" in said.out
    assert " INFO DAGScheduler" not in said.err
    assert "Spark's log shows only warnings" in said.out


# --- another Python on the executors ----------------------------------------------------------------

OTHER_PYTHON = """
    import time

    import torch
    from pyspark.sql import SparkSession

    import spark_elastic
    from spark_elastic.data.manifest import TensorField
    from spark_elastic.errors import ExecutorPythonError
    from spark_elastic.ml.fitted import Fitted
    from spark_elastic.ml.added_columns import OutputShape
    from spark_elastic.ml.torch.model import ElasticTorchModel

    spark = SparkSession.builder.master("local-cluster[1,1,1024]")
    spark = spark.config("spark.ui.enabled", "false").getOrCreate()
    model = ElasticTorchModel()
    inputs = (TensorField("id", ("id",), "<f4", ()),)
    model._attach(torch.nn.Identity(), Fitted(inputs, (OutputShape("<f4", ()),), "value"))
    for call in (
        lambda: model.transform(spark.range(10)),
        lambda: spark_elastic.run(lambda: 1, num_proc=1),
        lambda: spark_elastic.materialize(spark.range(10), {"x": ["id"]}, store="store"),
    ):
        began = time.monotonic()
        try:
            call()
        except ExecutorPythonError as error:
            print(f"{time.monotonic() - began:.1f} s: {error}")
"""


@pytest.mark.nightly
def test_executors_python_without_packages_is_named_with_ours_before_any_worker_starts(tmp_path):
    bare = python_without_packages(tmp_path / "bare")
    said = say(tmp_path, OTHER_PYTHON, env={"PATH": f"{bare}:{BARE_PATH}"})
    answers = [line for line in said.out.splitlines() if " s: " in line]
    assert len(answers) == 3, said.err
    for answer in answers:
        assert float(answer.split(" s: ")[0]) < 5.0 * slowness()
        assert "torch" in answer
        assert sys.executable in answer
        assert "PYSPARK_PYTHON" in answer


def slowness() -> float:
    """Return how much longer than on an idle machine everything takes now, at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
