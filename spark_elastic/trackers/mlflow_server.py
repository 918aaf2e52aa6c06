"""Whether a tracking server can be reached, and requests that do not retry for minutes.

MLflow's client retries a refused connection for about four minutes, for every call. A fit would seem to hang.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 3.0
_LIMITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""Limits of MLflow's requests, unless the user has set them."""

_lock = threading.Lock()
_users = 0
_set: list[str] = []


def is_reachable(uri: str) -> bool:
    """Return False if a tracking server accepts no connection. A store of files, and one behind a proxy, is assumed to
    be there.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return True
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.hostname):
        return True
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError):
        return False
    return True


@contextlib.contextmanager
def quick_requests() -> Iterator[None]:
    """Let requests of MLflow fail after one retry in the block. They read their limits from the environment."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _set[:] = [name for name in _LIMITS if name not in os.environ]
            os.environ.update({name: _LIMITS[name] for name in _set})
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                for name in _set:
                    os.environ.pop(name, None)
