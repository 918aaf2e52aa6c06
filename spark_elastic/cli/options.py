"""The command line of ``spark-elastic``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spark_elastic import __version__
from spark_elastic.errors import nearest
from spark_elastic.jobs.settings import RunSettings
from spark_elastic.settings import declarations

EPILOG = """\
examples:
  spark-elastic -np 4 --min-np 2 train.py --epochs 10
  spark-elastic --master spark://host:7077 --conf spark.executor.memory=4g -np 8 train.py
  spark-submit --master yarn "$(spark-elastic --submit-file)" -np 8 --min-np 4 train.py
  spark-elastic doctor --master spark://host:7077       whether a cluster is fit for it; doctor --help

exit codes:
  0  the script finished on every worker
  1  it raised, or the job could not go on (a script that exits with a code of its own: that code)
  2  the command, or what it names, has to change
  130  interrupted
"""


class _Parser(argparse.ArgumentParser):
    """Parses up to the script; all words after it are arguments of the script, also those that look like options."""

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the command line. Raise SystemExit, with code 2 and a message on stderr, if it is wrong."""
        ours, script = self._split(argv)
        options = self.parse_args(ours)
        options.script, options.script_args = (script[0], tuple(script[1:])) if script else (None, ())
        return options

    def _split(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        at = 0
        while at < len(argv):
            word = argv[at]
            if word == "--" or not word.startswith("-") or word == "-":
                return list(argv[:at]), list(argv[at + (word == "--") :])
            name, with_value, _ = word.partition("=")
            action = self._option_string_actions.get("-v" if set(name[1:]) == {"v"} else name)
            if action is None:
                known = nearest(name, list(self._option_string_actions))
                self.error(f"unknown option {name}" + (f"; did you mean {known}?" if known else ""))
            takes = 1 if action.nargs is None else action.nargs
            at += 1 if with_value else 1 + int(takes)
        return list(argv), []


def parser() -> _Parser:
    """Return the parser of ``spark-elastic``."""
    made = _Parser(
        prog="spark-elastic",
        usage="spark-elastic [options] script.py [arguments of the script]",
        description="Run a training script elastically inside Spark: on --master, or in the application that "
        "spark-submit started.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    workers = made.add_argument_group("workers")
    places = made.add_argument_group("hosts")
    places.add_argument("--host-discovery-script", metavar="FILE", help="prints the hosts to use: host or host:slots")
    without = "for hosts that the discovery script names without a number"
    again = "the script is a program for torchrun: workers get its environment, and all start again after a loss"
    workers.add_argument("--torchrun", dest="restart", action="store_const", const="world", help=again)
    places.add_argument("--slots-per-host", type=int, metavar="N", default=None, help=without)
    waiting = made.add_argument_group("timeouts, in seconds")
    for each in _WITH_FLAGS:
        is_time = each.setting.unit == "seconds"
        group = places if each.name in _OF_HOSTS else waiting if is_time else workers
        form = _FORMS.get(each.name) or {"type": float if is_time else int, "metavar": "S" if is_time else "N"}
        words = each.setting.doc.replace("`", "").replace("%", "%%")
        group.add_argument(*each.flags, dest=each.name, default=None, help=words, **form)

    spark = made.add_argument_group("where to run")
    spark.add_argument("--master", default=None, metavar="URL", help="default: local[*]; under spark-submit, its own")
    local = "local: plain processes here, no Spark"
    spark.add_argument("--launcher", choices=["spark", "local"], default="spark", help=local)
    spark.add_argument("--conf", type=pair, action="append", default=[], metavar="K=V", help="a Spark setting")

    output = made.add_argument_group("output")
    more = "more about what it waits for, and Spark's log"
    output.add_argument("-v", "--verbose", action="count", default=0, help=more)
    files = "also write DIR/rank.N/stdout and stderr"
    output.add_argument("--output-filename", type=Path, default=None, metavar="DIR", help=files)

    about = made.add_argument_group("about")
    about.add_argument("--check-build", action="store_true", help="show what is installed here and what is missing")
    about.add_argument("--submit-file", action="store_true", help="print the file to hand to spark-submit")
    about.add_argument("--version", action="version", version=f"spark-elastic {__version__}")
    return made


def run_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments for `spark_elastic.run`: only those that were given, because it has the defaults."""
    given = {each.name: value for each in _WITH_FLAGS if (value := getattr(options, each.name)) is not None}
    if options.cooldown_range is not None:
        given["cooldown_range"] = tuple(options.cooldown_range) if any(options.cooldown_range) else None
    if options.restart is not None:
        given["restart"] = options.restart
    if options.env is not None:
        given["env"] = dict(options.env)
    if options.status_port == "off":
        given["status_port"] = None
    given["verbose"] = 1 + options.verbose
    return given


def pair(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE, as a `type` of argparse."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, not {text!r}")
    return key, value


def _port(text: str) -> int | str:
    return text if text in ("auto", "off") else int(text)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("expected names separated by commas")
    return names


#: The settings of `run` that have options of the same name.
_WITH_FLAGS = tuple(each for each in declarations(RunSettings) if each.flags)
_OF_HOSTS = ("nics", "driver_port", "agent_ports", "encrypt")
_FORMS: dict[str, dict[str, Any]] = {
    "cooldown_range": {"type": float, "nargs": 2, "metavar": ("MIN", "MAX")},
    "nics": {"type": _names, "metavar": "A,B"},
    "driver_port": {"metavar": "PORTS"},
    "agent_ports": {"metavar": "PORTS"},
    "env": {"type": pair, "action": "append", "metavar": "K=V"},
    "encrypt": {"action": "store_true"},
    "status_port": {"type": _port, "metavar": "N|off"},
    "checkpoint_dir": {"metavar": "DIR"},
    "run_id": {"metavar": "NAME"},
}  # the forms of options that are neither one number of seconds nor one whole number
