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


def say(folder: Path, source: str, *, launcher: tuple[str, ...] = (), env: Mapping[str, str] | None = None) -> Said:
    """Run a program in a folder of its own, as `python program.py` or by another launcher."""
    program = folder / "program.py"
    program.write_text(textwrap.dedent(source))
    of_other_tests = ("PYSPARK", "PYTHONPATH", "SPARK_", "TF_CPP")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(of_other_tests)}
    done = subprocess.run(
        [*(launcher or (sys.executable,)), str(program)],
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
    import time

    import torch
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F
    from torch import nn

    import spark_elastic
    from spark_elastic import ElasticTorchEstimator

    spark = SparkSession.builder.master("local[3]").config("spark.ui.enabled", "false").getOrCreate()
    points = spark.range(2_000).select(F.randn(seed=1).alias("x"), F.randn(seed=2).alias("y"))
    points = points.withColumn("label", (F.col("x") > 0).cast("int"))
    driver = os.getpid()

    def broken_loss(output, label):
        if os.getpid() != driver:
            time.sleep(1.0)  # Spark draws its bar after half a second
            raise ValueError("my loss does not like this")
        return nn.functional.cross_entropy(output, label)

    def estimator(loss):
        torch.manual_seed(0)
        net = nn.Linear(2, 2)
        return ElasticTorchEstimator(
            model=net,
            optimizer=torch.optim.Adam(net.parameters()),
            loss=loss,
            feature_cols=["x", "y"],
            label_cols=["label"],
            epochs=1,
            num_proc=2,
            min_num_proc=1,
        )

    began = time.monotonic()
    model = estimator(nn.CrossEntropyLoss()).fit(points)
    print("fitted", time.monotonic() - began)
    predictions = model.transform(points).groupBy("prediction").count().collect()
    print("rows", sum(row["count"] for row in predictions), "of", len(predictions))
    print("bar again", spark.sparkContext._jsc.sc().progressBar().isDefined())
    estimator(broken_loss).fit(points)
"""


@pytest.fixture(scope="module")
def torch_said(tmp_path_factory) -> Said:
    bare = python_without_packages(tmp_path_factory.mktemp("bare") / "bin")
    return say(tmp_path_factory.mktemp("torch"), TORCH, env={"PATH": f"{bare}:{BARE_PATH}"})


def test_program_runs_without_an_activated_environment(torch_said):
    assert "fitted" in torch_said.out, torch_said.err
    assert "rows 2000 of 2" in torch_said.out, torch_said.err


def test_start_says_what_takes_its_time_and_no_timeout(torch_said):
    starts = [line for line in torch_said.ours if "starting 2 workers" in line]
    assert starts == ["spark_elastic: starting 2 workers (each imports torch, usually 5-20 s)"] * 2
    assert "s left" not in torch_said.err


def test_bar_of_spark_does_not_appear_between_our_lines(torch_said):
    assert "bar again True" in torch_said.out  # there is one, and it is hidden
    from_start_to_end = torch_said.err.partition("starting 2 workers")[2].partition("the job finished")[0]
    assert "[Stage" not in from_start_to_end
    assert "[Stage" not in torch_said.err.rpartition("starting 2 workers")[2].partition("the job failed")[0]


def test_error_of_a_loss_is_shown_once_with_the_users_frames_alone(torch_said):
    assert torch_said.code == 1
    shown = torch_said.err[torch_said.err.index("spark_elastic: the job failed") :]
    assert shown.count("raised ValueError: my loss does not like this") == 1
    assert torch_said.err.count("ValueError: my loss does not like this") == 1
    assert "in broken_loss" in shown
    frames = re.findall(r'File "([^"]+)"', shown)
    assert [Path(frame).name for frame in frames] == ["program.py", "estimator.py", "program.py"]
    assert "py4j" not in shown
    assert "During handling" not in shown


# --- Keras ------------------------------------------------------------------------------------------

KERAS = """
    import os
    import signal
    import sys

    import keras
    import numpy as np
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    import spark_elastic
    from spark_elastic import ElasticKerasEstimator

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    print("in the driver", file=sys.stderr, flush=True)

    class KillRank0(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            import spark_elastic.keras as hvd

            if batch == 5 and hvd.size() == 2 and hvd.rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def talkative(*more):
        plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=10, verbose=1)
        stopping = keras.callbacks.EarlyStopping(monitor="loss", min_delta=10, patience=2, verbose=1)
        return [plateau, stopping, *more]

    def model():
        net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)])
        return net, keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    points = spark.range(2_000).select(F.randn(seed=1).alias("x"), F.randn(seed=2).alias("y"))
    points = points.withColumn("label", (F.col("x") > 0).cast("int"))
    net, loss = model()
    common = dict(
        optimizer=keras.optimizers.Adam(1e-2), loss=loss, feature_cols=["x", "y"], label_cols=["label"], epochs=9,
        batch_size=200, min_num_proc=1, num_proc=2,
    )
    ElasticKerasEstimator(model=net, callbacks=talkative(), **common).fit(points)
    print("=== own loop", flush=True)
    print("=== own loop", file=sys.stderr, flush=True)

    def train():
        import spark_elastic.keras as hvd

        hvd.init()
        x = np.random.default_rng(0).normal(size=(1024, 2)).astype("float32")
        net, loss = model()
        net.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-2)), loss=loss)
        state = hvd.elastic.KerasState(net, batch=0, epoch=0)

        @hvd.elastic.run
        def loop(state):
            callbacks = [hvd.elastic.ElasticCallback(state), *talkative(KillRank0())]
            net.fit(x, (x[:, 0] > 0).astype("int32"), epochs=9, initial_epoch=state.epoch, callbacks=callbacks)

        loop(state)

    spark_elastic.run(train, num_proc=2, min_num_proc=1, output_dir="output")
"""


@pytest.fixture(scope="module")
def keras_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("keras")


@pytest.fixture(scope="module")
def keras_said(keras_folder) -> Said:
    said = say(keras_folder, KERAS)
    assert said.code == 0, said.err
    return said


@pytest.mark.soak
def test_tensorflow_prints_nothing_of_its_own_in_workers(keras_said):
    of_workers = [line for line in keras_said.err.splitlines() if line.startswith("[")]
    assert [line for line in of_workers if "<stderr>:" in line] == []


@pytest.mark.soak
def test_interrupted_step_is_one_line_on_the_screen_and_whole_in_the_files(keras_said, keras_folder):
    after = keras_said.err.partition("=== own loop")[2]
    assert "lost (killed by signal 9)" in after
    assert "Traceback" not in after
    kept = "".join(file.read_text() for file in keras_folder.glob("output/rank.*/stderr"))
    assert "HorovodInternalError" in kept


@pytest.mark.soak
def test_callbacks_of_an_estimator_print_once(keras_said):
    of_fit = keras_said.out.partition("=== own loop")[0]
    assert of_fit.count("Epoch 2: ReduceLROnPlateau reducing") == 1
    assert of_fit.count("early stopping") == 1


@pytest.mark.soak
def test_callbacks_of_an_own_loop_print_once_and_go_on_when_rank_0_is_lost(keras_said):
    of_loop = keras_said.out.partition("=== own loop")[2]
    assert of_loop.count("Epoch 2: ReduceLROnPlateau reducing") == 1
    assert of_loop.count("early stopping") == 1
    assert of_loop.count("Epoch 2/9") == 1
    assert "[1]<stdout>" not in of_loop


# --- spark-submit -----------------------------------------------------------------------------------

SUBMITTED = """
    from pyspark.sql import SparkSession

    import spark_elastic

    spark = SparkSession.builder.config("spark.ui.enabled", "false").getOrCreate()
    print(spark_elastic.run(lambda: 1, num_proc=1))
"""


@pytest.mark.parametrize("level", ["", pytest.param("INFO", marks=pytest.mark.soak)])
def test_submitted_program_is_not_drowned_by_sparks_log_unless_the_user_asks_for_it(tmp_path, level):
    import pyspark

    home = os.path.dirname(pyspark.__file__)
    asked = ("--conf", f"spark.log.level={level}") if level else ()
    launcher = (os.path.join(home, "bin", "spark-submit"), "--master", "local[2]", *asked)
    env = {"PATH": f"{os.path.dirname(sys.executable)}:{BARE_PATH}", "SPARK_HOME": home}
    said = say(tmp_path, SUBMITTED, launcher=launcher, env=env)
    # spark-submit writes the program's stderr to its stdout, and its own log to stderr
    assert "spark_elastic: starting 1 worker" in said.out, said.err
    assert "[1]" in said.out
    of_tasks = [line for line in said.err.splitlines() if " INFO DAGScheduler" in line]
    assert bool(of_tasks) == bool(level)
    assert ("Spark's log shows only warnings" in said.out) == (not level)


# --- another Python on the executors ----------------------------------------------------------------

OTHER_PYTHON = """
    import sys
    import time

    import torch
    from pyspark.sql import SparkSession

    import spark_elastic
    from spark_elastic.data.manifest import TensorField
    from spark_elastic.errors import ExecutorPythonError
    from spark_elastic.ml.model import Fitted
    from spark_elastic.ml.added_columns import OutputShape
    from spark_elastic.ml.torch.model import ElasticTorchModel

    spark = SparkSession.builder.master(sys.argv[1] if sys.argv[1:] else "local-cluster[1,1,1024]")
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


@pytest.mark.soak
def test_wrong_python_of_a_local_master_is_named_without_a_job(tmp_path):
    bare = python_without_packages(tmp_path / "bare")
    source = OTHER_PYTHON.replace("local-cluster[1,1,1024]", "local[1]")
    said = say(tmp_path, source, env={"PYSPARK_PYTHON": str(bare / "python3")})
    answers = [line for line in said.out.splitlines() if " s: " in line]
    assert len(answers) == 3, said.err
    for answer in answers:
        assert "it has no cloudpickle, numpy, torch, spark_elastic" in answer


def slowness() -> float:
    """Return how much longer than on an idle machine everything takes now, at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
