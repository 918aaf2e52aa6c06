"""Whether a tracking server can be reached and answers, and requests that do not retry for minutes.

MLflow's client retries a refused connection for about four minutes, for every call. A fit would seem to hang.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 3.0
ANSWER_TIMEOUT_S = 5.0
_NO_SERVER_BEHIND = (502, 503, 504)
"""The answers of a proxy whose server is down, and of a server that takes no requests now."""
_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
_LIMITS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    _TIMEOUT: "20",
    "MLFLOW_DATABRICKS_ENDPOINT_HTTP_RETRY_TIMEOUT": "40",
}
"""Limits of MLflow's requests, unless the user has set them."""
_LARGE_TIMEOUT = "120"
"""Seconds for a request that carries a model, which the server answers once it has stored it: MLflow's own default."""

_lock = threading.Lock()
_users = 0
_set: list[str] = []


def is_reachable(uri: str) -> bool:
    """Return False if a tracking server accepts no connection. A store of files, and one behind a proxy, is assumed to
    be there.
    """
    at = _address_of(uri)
    if at is None:
        return True
    try:
        socket.create_connection(at, timeout=CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def answers(uri: str) -> bool:
    """Return False if a tracking server that accepts connections answers no request, or only a proxy in front does."""
    if not is_reachable(uri):
        return False
    at, parts = _address_of(uri), urlsplit(uri)
    if at is None:
        return True
    if parts.scheme == "https":
        # Whether the certificate is good is for MLflow to judge. No credentials are sent here.
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            *at, timeout=ANSWER_TIMEOUT_S, context=ssl._create_unverified_context()
        )
    else:
        connection = http.client.HTTPConnection(*at, timeout=ANSWER_TIMEOUT_S)
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/health")
        return connection.getresponse().status not in _NO_SERVER_BEHIND
    except ssl.SSLError:
        return True  # for example, it asks for a client's certificate
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _address_of(uri: str) -> tuple[str, int] | None:
    """Return host and port of a tracking server; None for a store of files, and for one that is behind a proxy."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.hostname):
        return None
    try:
        return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:  # not a port; MLflow has its own message
        return None


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


@contextlib.contextmanager
def large_requests() -> Iterator[None]:
    """Give requests in the block, which is in one of `quick_requests`, the time that a model takes."""
    _set_timeout(_LARGE_TIMEOUT)
    try:
        yield
    finally:
        _set_timeout(_LIMITS[_TIMEOUT])


def _set_timeout(seconds: str) -> None:
    with _lock:
        if _TIMEOUT in _set:
            os.environ[_TIMEOUT] = seconds
