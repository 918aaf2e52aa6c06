"""RunSettings: every argument of `run` and `run_async`, declared once."""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from spark_elastic import settings as check
from spark_elastic.data.store import Store
from spark_elastic.driver.hosts import HostDiscovery
from spark_elastic.driver.launcher import LocalLauncher
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.jobs.driver_callbacks import DriverCallback
from spark_elastic.runs.folder import check_run_id
from spark_elastic.settings import LONGEST_S, ScalingSettings, Setting, meant_device
from spark_elastic.task.script import Script, collect
from spark_elastic.wire.interfaces import is_address, plain_address
from spark_elastic.wire.ports import valid_ports

# --- checks: return the value in its plain type, or raise InvalidSettingsError -----------------------


_discovery = check.accepting(
    "a HostDiscoveryScript, FixedHosts, or have their method",
    lambda value: callable(getattr(value, "find_available_hosts_and_slots", None)),
    hint="; for a script give HostDiscoveryScript(path), for a list FixedHosts(hosts)",
)
_stream = check.accepting("an open text file", lambda value: callable(getattr(value, "write", None)))
_launcher = check.accepting(
    "a LocalLauncher", lambda value: isinstance(value, LocalLauncher), hint="; without one, Spark is used"
)
_run_folders = check.accepting(
    "a path, a URI or a Store", lambda value: isinstance(value, (str, Path, Store)) and value != ""
)
_seconds_or_none = check.accepting(
    "a number of seconds, or 0 to keep none",
    lambda value: not isinstance(value, bool) and isinstance(value, numbers.Real) and 0 <= float(value) <= LONGEST_S,
    float,
)
_callable = check.accepting("the function itself", callable, hint="; to call train(5), give train, args=(5,)")
_arguments = check.accepting(
    "a list or a tuple",
    lambda value: isinstance(value, Sequence) and not isinstance(value, (str, bytes)),
    tuple,
    "; one argument is args=(x,)",
)


def _function(name: str, value: Any) -> Callable[..., Any]:
    """Return the function, or the script at a path, with its modules, as one."""
    function: Callable[..., Any] = collect(str(value)) if isinstance(value, (str, Path)) else _callable(name, value)
    return function


def _environment(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise check.wrong(name, "a dict of variables", value)
    for variable, text in value.items():
        if not isinstance(variable, str) or not variable or "=" in variable or "\0" in variable:
            raise InvalidSettingsError(f"{name}: {variable!r} is no name of an environment variable")
        if not isinstance(text, str) or "\0" in text:
            raise check.wrong(f"{name}: the value of {variable}", "a str without NUL", text)
    return dict(value)


def _interface_names(name: str, value: Any) -> tuple[str, ...] | None:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (Sequence, set, frozenset)) or not all(isinstance(n, str) and n.strip() for n in names):
        raise check.wrong(name, "names of network interfaces, such as 'eth0'", value)
    return tuple(each.strip() for each in names) or None


def _ports(name: str, value: Any) -> int | str:
    ports = valid_ports(name, value)
    return ports.first if ports.size == 1 else str(ports)


def _device(name: str, value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        hint = f"; did you mean {meant!r}?" if (meant := meant_device(value)) else ""
        raise InvalidSettingsError(f"{name} must be 'auto', 'cpu', 'cuda' or 'cuda:0', not {value!r}{hint}")
    return value


def _verbosity(name: str, value: Any) -> int:
    return int(value) if isinstance(value, bool) else check.whole_number(name, value, at_least=0)


def checked_status_port(name: str, value: Any) -> int | str:
    """Return the port of a status page, or "auto"; raise `InvalidSettingsError` for other values."""
    if isinstance(value, str) and value == "auto":
        return value
    if isinstance(value, (str, bool)):
        raise check.wrong(name, "a port, 0 for any free one, 'auto', or None for no status page", value)
    port = check.whole_number(name, value, at_least=0)
    if port > 65535:
        raise InvalidSettingsError(f"{name} must be a port of at most 65535, not {port}; 0 takes any free one")
    return port


def _resources(name: str, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping) or not value or not all(isinstance(each, str) and each for each in value):
        raise check.wrong(name, "a dict such as {'gpu': 1, 'cpus': 4}", value)
    for resource, amount in value.items():
        number = 0.0 if isinstance(amount, bool) or not isinstance(amount, numbers.Real) else float(amount)
        if not (number >= 1 and number.is_integer()) and not (resource != "cpus" and 0 < number <= 0.5):
            wanted = "a whole number" if resource == "cpus" else "a whole number, or a share of at most 0.5"
            raise InvalidSettingsError(f"{name}: {resource!r} must be {wanted}, not {amount!r}")
    return {resource: float(amount) if amount < 1 else int(amount) for resource, amount in value.items()}


def _driver_callbacks(name: str, value: Any) -> tuple[Any, ...]:
    given = (value,) if isinstance(value, DriverCallback) else value
    if not isinstance(given, (list, tuple)) or not all(isinstance(each, DriverCallback) for each in given):
        raise check.wrong(name, "a list of spark_elastic.DriverCallback", value)
    return tuple(given)


def _host(name: str, value: Any) -> str:
    host = plain_address(value.strip()) if isinstance(value, str) else ""
    if not host or "/" in host or (":" in host and not is_address(host)):
        raise InvalidSettingsError(f"{name} must be an address or a host's name, without a port, not {value!r}")
    return host


# --- the settings -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunSettings(ScalingSettings):
    """The keyword arguments of `run`: `ScalingSettings`, and where and how the workers run.

    Raises:
        InvalidSettingsError: A value is invalid, or two contradict each other.
    """

    spark: Annotated[
        Any, Setting("a SparkSession, also one of Spark Connect, or a SparkContext. Default: the active one.")
    ] = None
    driver_host: Annotated[
        str | None,
        Setting(
            "Spark Connect: address or name at which executors reach this program. Default: those of its addresses "
            "that executors have reached. (A classic session has `spark.driver.host`.)",
            _host,
        ),
    ] = None
    ship_package: Annotated[
        bool, Setting("Spark Connect: send this package to executors that lack it, for this session.", check.boolean)
    ] = False
    discovery: Annotated[
        HostDiscovery | None,
        Setting("limits the hosts and slots to use: `HostDiscoveryScript`, `FixedHosts`, or your own.", _discovery),
    ] = None
    env: Annotated[
        Mapping[str, str] | None,
        Setting("environment variables to add to those of the workers.", _environment, on_command_line=True),
    ] = None
    nics: Annotated[
        Sequence[str] | str | None,
        Setting(
            "names of the network interfaces that may carry collectives. Default: those that reach one another.",
            _interface_names,
            on_command_line=True,
            horovod_name="network_interfaces",
        ),
    ] = None
    driver_port: Annotated[
        int | str | None,
        Setting(
            "port at which the driver listens for its agents and workers, or a range such as '40000-40015', of which "
            "each job that runs at the same time takes one. Default: `spark.elastic.driver.port` of the Spark session, "
            "or else any free port.",
            _ports,
            on_command_line=True,
        ),
    ] = None
    agent_ports: Annotated[
        int | str | None,
        Setting(
            "ports at which agents listen, one for each task of a host, so that agents of other hosts find out whether "
            "they reach it. Default: `spark.elastic.agent.ports` of the Spark session, or else any free port. The "
            "ports of collectives are the system's choice, from `net.ipv4.ip_local_port_range`.",
            _ports,
            on_command_line=True,
        ),
    ] = None
    encrypt: Annotated[
        bool,
        Setting(
            "encrypt messages between the driver and its agents and workers (membership, progress, log lines). "
            "Needs the package cryptography on the driver and on executors (extra `encryption`). Gradients between "
            "hosts are not affected, see docs/security.md.",
            check.boolean,
            on_command_line=True,
        ),
    ] = False
    device: Annotated[
        str,
        Setting(
            'device that the workers compute on, there `hvd.device()`. "auto": a GPU where they have one; "cpu": GPUs '
            'are hidden from them; "cuda": a worker without a GPU fails at once. Gradients on GPUs are reduced by NCCL '
            "where each worker has its own GPU.",
            _device,
        ),
    ] = "auto"
    resources: Annotated[
        Mapping[str, float] | None,
        Setting(
            "what Spark gives to each worker's task, such as `{'gpu': 1, 'cpus': 4}`: a resource profile, for "
            "standalone clusters, YARN and Kubernetes; use one per session. Default: what `spark.task.*` say.",
            _resources,
        ),
    ] = None
    keep_workers: Annotated[
        float | None,
        Setting(
            "seconds for which each executor keeps a process that has imported what workers need, so that the next job "
            "of the session, or a restart, starts sooner; 0: none. PyTorch on Linux only. Default: 60 in a notebook "
            "and with `restart`, 20 in local mode, else 0.",
            _seconds_or_none,
            "seconds",
            on_command_line=True,
        ),
    ] = None
    stdout: Annotated[
        TextIO | None,
        Setting(
            "open text file for the workers' standard output, each line with its rank in front. "
            "Default: this process's own.",
            _stream,
        ),
    ] = None
    stderr: Annotated[TextIO | None, Setting("the same for their standard error.", _stream)] = None
    output_dir: Annotated[
        str | Path | Store | None,
        Setting(
            "path, URI or Store to write the output to as well: `rank.0/stdout`, `rank.0/stderr`, and so on.",
            horovod_name="output_filename",
        ),
    ] = None
    verbose: Annotated[
        int,
        Setting(
            "0: only the workers' output; 1: a bar (in a terminal or a notebook, few lines elsewhere) and a line for "
            "each change of the workers; 2: each step of them.",
            _verbosity,
        ),
    ] = 1
    status_port: Annotated[
        int | Literal["auto"] | None,
        Setting(
            'port of the job\'s status page; 0: any free one; None: no page. "auto": a page at a free port where all '
            "workers run on the driver's machine, unless `verbose` is 0.",
            checked_status_port,
            on_command_line=True,
        ),
    ] = "auto"
    callbacks: Annotated[
        DriverCallback | Sequence[DriverCallback],
        Setting(
            "list of `DriverCallback`, which are called on the driver when the job starts, its workers change and it "
            "ends; not for `run_async`. An estimator has a setting of this name.",
            _driver_callbacks,
        ),
    ] = ()
    checkpoint_dir: Annotated[
        str | Path | Store | None,
        Setting(
            "shared path, URI or Store to which the commits of the function's elastic loops are written, at most one "
            "in ten seconds. Default: none are written.",
            _run_folders,
            on_command_line=True,
        ),
    ] = None
    run_id: Annotated[
        str | None,
        Setting(
            "name of this run below `checkpoint_dir`. A call with the run_id of a job that has ended, in whatever way, "
            "resumes from its last commit. Default: a new name, which is printed.",
            check.identifier,
            on_command_line=True,
        ),
    ] = None
    launcher: Annotated[
        LocalLauncher | None,
        Setting("a `LocalLauncher` runs the workers as plain processes of this machine, without Spark.", _launcher),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_run_id(self.run_id, self.checkpoint_dir)
        if self.resources is not None and self.launcher is not None:
            raise InvalidSettingsError("resources= is for Spark's tasks; a LocalLauncher has processes; leave it out")
        if self.restart is not None and self.checkpoint_dir is not None:
            raise InvalidSettingsError(
                "checkpoint_dir is for elastic loops (hvd.elastic.run), which restart='world' has none of: give the "
                "program a folder in its own arguments, on storage that all hosts share"
            )


@dataclass(frozen=True)
class RunCall(RunSettings):
    """A call of `run`: the function, its arguments, and the settings as keywords."""

    fn: Annotated[
        Callable[..., Any] | str | Path,
        Setting("the function, or the path of a script; it and its arguments travel by cloudpickle.", _function),
    ]
    args: Annotated[Sequence[Any], Setting("its positional arguments.", _arguments)] = ()
    kwargs: Annotated[Mapping[str, Any] | None, Setting("its keyword arguments.", check.dictionary)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.fn, Script) and (self.kwargs or not all(isinstance(each, str) for each in self.args)):
            raise InvalidSettingsError(f"{self.fn.name} is a script: give its arguments as texts, args=('--lr', '0.1')")

    @property
    def function(self) -> Callable[..., Any]:
        """The function to run; of a path, the script."""
        assert callable(self.fn), "checked when the call was made"
        return self.fn
