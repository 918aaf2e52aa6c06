"""``spark-elastic doctor`` checks a cluster; ``spark-elastic --check-build`` checks what is installed here."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence

from spark_elastic.cli.options import pair
from spark_elastic.cli.submission import connect_session, spark_session
from spark_elastic.diagnostics.examination import Examination, installed_version
from spark_elastic.errors import InvalidSettingsError, JavaNotFoundError
from spark_elastic.spark.java import check_java

EPILOG = """\
examples:
  spark-elastic doctor
  spark-elastic doctor --master spark://host:7077 --conf spark.executor.memory=4g -np 8 --store s3://bucket/folder
  spark-elastic doctor --remote sc://host:15002 -np 8
  spark-submit --master yarn "$(spark-elastic --submit-file)" doctor --store hdfs:///tmp/training

exit codes: 0: no problem was found; 1: there is one; 2: the command has to change
"""


def check_build() -> tuple[str, bool]:
    """Return a report about what is installed here, and True if a job could be run."""
    lines = [f"Python {platform.python_version()}"]
    usable, mark = True, {True: "X", False: " "}

    version = installed_version("torch")
    if version is None:
        usable = False
        lines.append("[ ] PyTorch: not installed; pip install torch")
    else:
        import torch

        usable = gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
        lines.append(f"[{mark[gloo]}] PyTorch {version}" + ("" if gloo else ": built without Gloo, which is needed"))
        lines.append(f"[{mark[torch.cuda.is_available()]}] GPUs that PyTorch can use here")

    spark = installed_version("pyspark")
    usable = usable and spark is not None
    missing = "not installed; install spark-elastic with the extra [spark], or run under the cluster's own spark-submit"
    lines.append(f"[{mark[spark is not None]}] PySpark {spark or ': ' + missing}")

    try:
        lines.append(f"[X] Java: {check_java()}")
    except JavaNotFoundError as error:
        usable = False
        lines.append(f"[ ] Java: {error}")

    keras = installed_version("tensorflow") or installed_version("tensorflow-cpu")
    lines.append(f"[{mark[keras is not None]}] TensorFlow {keras or '(optional)'}")
    return "\n".join(lines), usable


def doctor(argv: Sequence[str]) -> int:
    """Run the command ``doctor`` with the arguments that follow it. Returns the exit code."""
    options = _parser().parse_args(argv)
    ports = {"driver_port": options.driver_port, "agent_ports": options.agent_ports}
    try:
        examination = Examination(options.timeout, options.num_proc, options.store, **ports)
    except InvalidSettingsError as error:
        _parser().error(str(error))
    option, where = ("--remote", options.remote) if options.remote else ("--master", options.master or "this machine")
    session = spark_session("spark-elastic doctor", options.master, options.conf, slots=options.num_proc)
    looking = examination.run(connect_session(where, options.conf) if options.remote else session, where, option)
    report = examination.report()
    print(report.to_json() if options.json else report)
    sys.stdout.flush()
    code = 0 if report.ok else 1
    looking.join(2.0)  # Spark stops
    if looking.is_alive():
        os._exit(code)  # otherwise the interpreter would wait for Spark
    return code


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
    made.add_argument("-np", "--num-proc", type=int, default=None, metavar="N", help="workers of the planned job")
    listens = "of the planned job; the doctor's job listens there"
    made.add_argument("--driver-port", default=None, metavar="PORTS", help=listens)
    made.add_argument("--agent-ports", default=None, metavar="PORTS", help="of the planned job, likewise")
    limit = "limit for all checks (default: 120)"
    made.add_argument("--timeout", type=float, default=120.0, metavar="S", help=limit)
    made.add_argument("--json", action="store_true", help="print the report as JSON")
    return made
