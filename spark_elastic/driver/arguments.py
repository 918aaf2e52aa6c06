"""The arguments of `run` that are no settings: whatever is wrong with them is said before anything starts."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.settings import whole_number

_P = ParamSpec("_P")
_R = TypeVar("_R")

_RENAMED = {
    "np": "num_proc",
    "min_np": "min_num_proc",
    "max_np": "max_num_proc",
    "output_filename": "output_dir",
    "blacklist_cooldown_range": "cooldown_range",
    "network_interfaces": "nics",
}
_WITHOUT_EFFECT = {
    "use_gloo": "collectives always run over Gloo, and over NCCL where workers have GPUs of their own",
    "use_mpi": "there is no MPI here; collectives run over Gloo",
    "mpi_args": "there is no MPI here",
    "extra_mpi_args": "there is no MPI here",
    "executable": "workers run the Python of their executors (spark.pyspark.python)",
    "prefix_output_with_timestamp": "each line has its rank in front",
}


def with_horovods_names(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have `run` take the names that Horovod has for its arguments, with a warning that says the right one."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        given: dict[str, Any] = dict(kwargs)
        for old in [name for name in given if name in _RENAMED or name in _WITHOUT_EFFECT]:
            value = given.pop(old)
            if old in _WITHOUT_EFFECT:
                warnings.warn(f"{old}= has no effect: {_WITHOUT_EFFECT[old]}", stacklevel=2)
                continue
            new = _RENAMED[old]
            if new in given:
                raise InvalidSettingsError(f"{old}={value!r} and {new}={given[new]!r} are the same setting; give {new}")
            warnings.warn(f"{old}= is Horovod's name for this; it is called {new}= here", stacklevel=2)
            given[new] = value
        return function(*args, **given)

    return call


def check_call(fn: Any, args: Any, kwargs: Any) -> None:
    """Raises: InvalidSettingsError: `fn(*args, **kwargs)` is no call."""
    if not callable(fn):
        raise InvalidSettingsError(
            f"the first argument must be the function itself, not {_shown(fn)}; to call train(5), give train, args=(5,)"
        )
    if not isinstance(args, Sequence) or isinstance(args, (str, bytes)):
        raise InvalidSettingsError(f"args must be a list or a tuple, not {_shown(args)}; one argument is args=(x,)")
    if kwargs is None:
        return
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise InvalidSettingsError(f"kwargs must be a dict with names as keys, not {_shown(kwargs)}")


def environment(env: Any) -> dict[str, str]:
    """Raises: InvalidSettingsError: naming the entry that no process can be given."""
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise InvalidSettingsError(f"env must be a dict of variables, not {_shown(env)}")
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise InvalidSettingsError(f"env: {name!r} is no name of an environment variable")
        if not isinstance(value, str) or "\0" in value:
            raise InvalidSettingsError(f"env: the value of {name} must be a str without NUL, not {_shown(value)}")
    return dict(env)


def interface_names(nics: Any) -> tuple[str, ...] | None:
    """Raises: InvalidSettingsError: not one name or several."""
    if nics is None:
        return None
    names = (nics,) if isinstance(nics, str) else nics
    if not isinstance(names, (Sequence, set, frozenset)) or not all(isinstance(n, str) and n.strip() for n in names):
        raise InvalidSettingsError(f"nics must be names of network interfaces, such as 'eth0', not {_shown(nics)}")
    return tuple(name.strip() for name in names) or None


def check_discovery(discovery: Any) -> None:
    """Raises: InvalidSettingsError: it cannot be asked for hosts."""
    if discovery is None or callable(getattr(discovery, "find_available_hosts_and_slots", None)):
        return
    raise InvalidSettingsError(
        f"discovery must be a HostDiscoveryScript, FixedHosts, or have their method, not {_shown(discovery)}; for a "
        "script give HostDiscoveryScript(path), for a list FixedHosts(hosts)"
    )


def check_output(stdout: Any, stderr: Any, verbose: Any) -> None:
    """Raises: InvalidSettingsError: a stream that cannot be written to, or a level that is no number."""
    for name, stream in (("stdout", stdout), ("stderr", stderr)):
        if stream is not None and not callable(getattr(stream, "write", None)):
            raise InvalidSettingsError(f"{name} must be an open text file, not {_shown(stream)}")
    if not isinstance(verbose, bool):  # False and True are 0 and 1 to everybody
        whole_number("verbose", verbose, at_least=0)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:80] + '...'} ({type(value).__name__})"


def device(asked: object) -> str:
    """Of a job. Raises: InvalidSettingsError."""
    if not isinstance(asked, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", asked):
        raise InvalidSettingsError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:0', not {asked!r}")
    return asked
