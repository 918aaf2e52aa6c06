"""The command ``spark-elastic``: run a training script elastically inside Spark.

`options` has the command line, `submission` the Spark session, `checks` the commands ``doctor`` and
``--check-build``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spark_elastic.cli import options as command_line
from spark_elastic.cli.checks import check_build, doctor
from spark_elastic.cli.submission import spark_session
from spark_elastic.driver.hosts import HostDiscoveryScript
from spark_elastic.driver.launcher import LocalLauncher
from spark_elastic.errors import JobCancelledError, RunTakenError, SparkElasticError, UsageError, UserFunctionError
from spark_elastic.jobs import run as runner
from spark_elastic.task.script import collect

FINISHED, FAILED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["doctor"]:  # a script of that name is ./doctor
        return doctor(words[1:])
    parser = command_line.parser()
    options = parser.parse(words)
    if options.check_build:
        report, usable = check_build()
        print(report)
        return FINISHED if usable else FAILED
    if options.submit_file:
        print(Path(__file__).resolve().parent.parent / "__main__.py")
        return FINISHED
    if options.script is None:
        parser.error("no script was given; name the script to run (--help shows how)")

    with contextlib.suppress(ValueError):  # not the main thread: the caller decides about signals
        # as Ctrl-C does: otherwise the workers would have to notice that the driver is gone
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    return execute(options, run=runner.run, open_session=spark_session)


def execute(options: argparse.Namespace, *, run: Callable[..., Any], open_session: Callable[..., Any]) -> int:
    """Run the script by `run` in a session of `open_session`; print errors on stderr. Returns the exit code."""
    try:
        _run(options, run, open_session)
        return FINISHED
    except (KeyboardInterrupt, JobCancelledError):
        text, code = "interrupted", INTERRUPTED
    except UserFunctionError as error:
        text, code = f"{os.path.basename(options.script)}: {error}", FAILED
        exit_code: int | None = getattr(error, "exit_code", None)
        if exit_code is not None:  # the script exited on purpose: no traceback
            text, code = text.partition("\n")[0], exit_code & 0xFF or FAILED
    except SparkElasticError as error:
        wrong_use = isinstance(error, UsageError) and not isinstance(error, RunTakenError)
        text, code = f"error: {error}", WRONG_USE if wrong_use else FAILED
    print(f"spark-elastic: {text}", file=sys.stderr)
    return code


def _run(options: argparse.Namespace, run: Callable[..., Any], open_session: Callable[..., Any]) -> None:
    if re.fullmatch(r"python[0-9.]*", os.path.basename(options.script)) and options.script_args:
        raise UsageError(f"give the script itself, without {options.script} before it")
    script = collect(options.script, options.script_args)
    arguments = command_line.run_arguments(options)
    if options.slots_per_host is not None and options.host_discovery_script is None:
        raise UsageError("--slots-per-host needs --host-discovery-script, whose output it completes")
    if options.output_filename is not None:
        _prepare_output(options.output_filename)
        arguments["output_dir"] = options.output_filename
    with contextlib.ExitStack() as closing:
        if options.host_discovery_script is not None:
            slots = options.slots_per_host or 1
            arguments["discovery"] = HostDiscoveryScript(options.host_discovery_script, default_slots=slots)
        if options.launcher == "local":
            arguments["launcher"] = LocalLauncher()
        else:
            slots = options.max_num_proc or options.num_proc
            session = open_session(script.name, options.master, options.conf, slots=slots, quiet=not options.verbose)
            arguments["spark"] = closing.enter_context(session)
        run(script, **arguments)


def _prepare_output(folder: Path) -> None:
    """Make the folder, and remove the files of an earlier run in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        for process, stream in itertools.product(("rank", "slot"), ("stdout", "stderr")):
            for file in folder.glob(f"{process}.*/{stream}"):
                file.unlink()
    except OSError as error:
        raise UsageError(f"cannot write to --output-filename {folder}: {error.strerror or error}") from None
