"""The arguments of `run` that are no settings: whatever is wrong with them is said before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.settings import whole_number


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
