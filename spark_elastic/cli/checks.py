"""``spark-elastic doctor`` checks a cluster; ``spark-elastic --check-build`` checks what is installed here."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import platform
import sys
import threading
from collections.abc import Sequence
from importlib import metadata

from spark_elastic.cli.options import pair
from spark_elastic.cli.submission import spark_session
from spark_elastic.diagnostics.examination import Examination
from spark_elastic.diagnostics.findings import PROBLEM, Finding
from spark_elastic.driver.preflight import check_java
from spark_elastic.errors import JavaNotFoundError, SparkElasticError

EPILOG = """\
examples:
  spark-elastic doctor
  spark-elastic doctor --master spark://host:7077 --conf spark.executor.memory=4g -np 8 --store s3://bucket/folder
  spark-submit --master yarn "$(spark-elastic --submit-file)" doctor --store hdfs:///tmp/training

exit codes: 0: no problem was found; 1: there is one; 2: the command has to change
"""

_NO_PROBLEM, _PROBLEM_FOUND = 0, 1


def check_build() -> tuple[str, bool]:
    """Return a report about what is installed here, and True if a job could be run."""
    lines = [f"Python {platform.python_version()}"]
    usable = True

    torch = _version("torch")
    if torch is None:
        usable = False
        lines.append("[ ] PyTorch: not installed; pip install torch")
    else:
        gloo, cuda = _torch_features()
        usable = usable and gloo
        lines.append(f"[{_mark(gloo)}] PyTorch {torch}" + ("" if gloo else ": built without Gloo, which is needed"))
        lines.append(f"[{_mark(cuda)}] GPUs that PyTorch can use here")

    spark = _version("pyspark")
    usable = usable and spark is not None
    missing = "not installed; pip install 'spark-elastic[spark]', or run under the cluster's own spark-submit"
    lines.append(f"[{_mark(spark is not None)}] PySpark {spark or ': ' + missing}")

    try:
        lines.append(f"[X] Java: {check_java()}")
    except JavaNotFoundError as error:
        usable = False
        lines.append(f"[ ] Java: {error}")

    keras = _version("tensorflow") or _version("tensorflow-cpu")
    lines.append(f"[{_mark(keras is not None)}] TensorFlow {keras or '(optional)'}")
    return "\n".join(lines), usable


def _mark(present: bool) -> str:
    return "X" if present else " "


def _torch_features() -> tuple[bool, bool]:
    torch = importlib.import_module("torch")
    distributed = importlib.import_module("torch.distributed")
    gloo = distributed.is_available() and distributed.is_gloo_available()
    return bool(gloo), bool(torch.cuda.is_available())


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def doctor(argv: Sequence[str]) -> int:
    """Run the command ``doctor`` with the arguments that follow it. Returns the exit code."""
    options = _parser().parse_args(argv)
    examination = Examination(options.timeout, num_proc=options.num_proc, store=options.store)
    opened, over = threading.Event(), threading.Event()
    looking = threading.Thread(target=_look, args=(examination, options, opened, over), name="spark_elastic-doctor")
    looking.daemon = True
    looking.start()
    if not over.wait(options.timeout + 2.0) and not opened.is_set():
        problem = f"no session on {options.master or 'this machine'} within {options.timeout:.0f} s"
        examination.look_without_spark(problem, "check that the master answers there; Spark says more on stderr")
    elif not over.is_set():
        problem = f"the checkup did not end within {options.timeout:.0f} s"
        examination.add(Finding("deadline", PROBLEM, problem, "see Spark's own messages above, or give --timeout more"))
    report = examination.report()
    print(report.to_json() if options.json else report)
    sys.stdout.flush()
    code = _NO_PROBLEM if report.ok else _PROBLEM_FOUND
    looking.join(2.0)  # Spark stops
    if looking.is_alive():
        os._exit(code)  # otherwise the interpreter would wait for Spark
    return code


def _look(
    examination: Examination, options: argparse.Namespace, opened: threading.Event, over: threading.Event
) -> None:
    try:
        examination.look_here()
        with contextlib.ExitStack() as closing:
            try:
                made = spark_session("spark-elastic doctor", options.master, options.conf, slots=options.num_proc)
                session = closing.enter_context(made)
                opened.set()
            except SparkElasticError as error:
                examination.look_without_spark(f"no session: {error}", "see the lines above, and Spark's own messages")
                return
            except Exception as error:  # from Spark's JVM, which prints more on stderr
                examination.look_without_spark(
                    f"no session on {options.master or 'this machine'}: {_first_line(error)}",
                    "check --master and --conf, and Spark's own messages on stderr",
                )
                return
            examination.look_at(session)
            over.set()
    finally:
        over.set()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="spark-elastic doctor",
        description="Look at a cluster with a short Spark job, and say what is wrong and how to mend it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--master", default=None, metavar="URL", help="default: local[*]; under spark-submit, its own")
    made.add_argument("--conf", type=pair, action="append", default=[], metavar="K=V", help="a Spark setting")
    made.add_argument("--store", default=None, metavar="URL", help="storage for the data of estimators")
    made.add_argument("-np", "--num-proc", type=_count, default=None, metavar="N", help="workers of the planned job")
    made.add_argument(
        "--timeout", type=_seconds, default=120.0, metavar="S", help="limit for all checks (default: 120)"
    )
    made.add_argument("--json", action="store_true", help="print the report as JSON")
    return made


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, not {text}")
    return count


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected 1 to 3600 seconds, not {text}")
    return seconds
