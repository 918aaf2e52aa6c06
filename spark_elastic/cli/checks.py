"""``spark-elastic doctor`` checks a cluster; ``spark-elastic --check-build`` checks what is installed here."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import threading
from collections.abc import Sequence
from typing import Any

from spark_elastic.cli.options import pair
from spark_elastic.cli.submission import connect_session, spark_session
from spark_elastic.diagnostics.examination import Examination, installed_version
from spark_elastic.diagnostics.findings import PROBLEM, Finding
from spark_elastic.errors import InvalidSettingsError, JavaNotFoundError, SparkElasticError
from spark_elastic.redaction import first_line
from spark_elastic.spark.java import check_java
from spark_elastic.wire.ports import valid_ports

EPILOG = """\
examples:
  spark-elastic doctor
  spark-elastic doctor --master spark://host:7077 --conf spark.executor.memory=4g -np 8 --store s3://bucket/folder
  spark-elastic doctor --remote sc://host:15002 -np 8
  spark-submit --master yarn "$(spark-elastic --submit-file)" doctor --store hdfs:///tmp/training

exit codes: 0: no problem was found; 1: there is one; 2: the command has to change
"""

_NO_PROBLEM, _PROBLEM_FOUND = 0, 1


def check_build() -> tuple[str, bool]:
    """Return a report about what is installed here, and True if a job could be run."""
    lines = [f"Python {platform.python_version()}"]
    usable = True

    version = installed_version("torch")
    if version is None:
        usable = False
        lines.append("[ ] PyTorch: not installed; pip install torch")
    else:
        import torch

        usable = gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
        lines.append(f"[{_mark(gloo)}] PyTorch {version}" + ("" if gloo else ": built without Gloo, which is needed"))
        lines.append(f"[{_mark(torch.cuda.is_available())}] GPUs that PyTorch can use here")

    spark = installed_version("pyspark")
    usable = usable and spark is not None
    missing = "not installed; install spark-elastic with the extra [spark], or run under the cluster's own spark-submit"
    lines.append(f"[{_mark(spark is not None)}] PySpark {spark or ': ' + missing}")

    try:
        lines.append(f"[X] Java: {check_java()}")
    except JavaNotFoundError as error:
        usable = False
        lines.append(f"[ ] Java: {error}")

    keras = installed_version("tensorflow") or installed_version("tensorflow-cpu")
    lines.append(f"[{_mark(keras is not None)}] TensorFlow {keras or '(optional)'}")
    return "\n".join(lines), usable


def _mark(present: bool) -> str:
    return "X" if present else " "


def doctor(argv: Sequence[str]) -> int:
    """Run the command ``doctor`` with the arguments that follow it. Returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        for name, value in (("--driver-port", options.driver_port), ("--agent-ports", options.agent_ports)):
            if value is not None:
                valid_ports(name, value)
    except InvalidSettingsError as error:
        _parser().error(str(error))
    examination = Examination(
        options.timeout,
        num_proc=options.num_proc,
        store=options.store,
        driver_port=options.driver_port,
        agent_ports=options.agent_ports,
    )
    opened, over = threading.Event(), threading.Event()
    looked_at = examination, options, opened, over
    looking = threading.Thread(target=_look, args=looked_at, name="spark_elastic doctor", daemon=True)
    looking.start()
    if not over.wait(options.timeout + 2.0) and not opened.is_set():
        problem = f"no session on {_where(options)} within {options.timeout:.0f} s"
        examination.check_without_spark(problem, "check that the master answers there; Spark says more on stderr")
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
        examination.check_driver()
        with contextlib.ExitStack() as closing:
            try:
                session = closing.enter_context(_session(options))
            except SparkElasticError as error:
                examination.check_without_spark(f"no session: {error}", "see the lines above, and Spark's own messages")
                return
            except Exception as error:  # of Spark's JVM, which has said more on stderr
                problem = f"no session on {_where(options)}: {first_line(error)}"
                where = "--remote" if options.remote else "--master"
                fix = f"check {where} and --conf, and Spark's own messages on stderr"
                examination.check_without_spark(problem, fix)
                return
            opened.set()
            examination.check_cluster(session)
            over.set()  # before Spark stops
    finally:
        over.set()


def _session(options: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    if options.remote is not None:
        return connect_session(options.remote, options.conf)
    return spark_session("spark-elastic doctor", options.master, options.conf, slots=options.num_proc)


def _where(options: argparse.Namespace) -> str:
    return str(options.remote or options.master or "this machine")


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="spark-elastic doctor",
        description="Look at a cluster with a short job, and say what is wrong and how to mend it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    session = made.add_mutually_exclusive_group()
    session.add_argument("--master", default=None, metavar="URL", help="default: local[*]; under spark-submit, its own")
    session.add_argument("--remote", default=None, metavar="URL", help="a Spark Connect server: sc://host:15002")
    made.add_argument("--conf", type=pair, action="append", default=[], metavar="K=V", help="a Spark setting")
    made.add_argument("--store", default=None, metavar="URL", help="storage for the data of estimators")
    made.add_argument("-np", "--num-proc", type=_count, default=None, metavar="N", help="workers of the planned job")
    made.add_argument(
        "--driver-port", default=None, metavar="PORTS", help="of the planned job; the doctor's job listens there"
    )
    made.add_argument("--agent-ports", default=None, metavar="PORTS", help="of the planned job, likewise")
    limit = "limit for all checks (default: 120)"
    made.add_argument("--timeout", type=_seconds, default=120.0, metavar="S", help=limit)
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
