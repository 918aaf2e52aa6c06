"""The status page of a job: a small HTTP server on its own thread, with the page, its JSON and Prometheus's metrics.

It answers GET and HEAD to requests with the token, and only reads: nothing about the job can be changed through it.
Each connection has a thread; their number, the size of a request and the time for it are limited, and each response
closes its connection. At the end of the job, requests that wait for news get the final state, so that a page which is
open says how the job ended.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from spark_elastic import clock
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.reporting.job_status import Document
from spark_elastic.reporting.prometheus import CONTENT_TYPE as METRICS_TYPE
from spark_elastic.reporting.prometheus import metrics_text
from spark_elastic.wire.interfaces import is_address

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "SPARK_ELASTIC_STATUS_TOKEN"  # in the driver's environment: a token to use instead of a random one
MAX_CONNECTIONS = 64  # that are served at a time; those beyond get a 503
REFUSAL_S = 0.1  # seconds that the request of such a connection may take to arrive, before others are accepted
MAX_REQUEST_BYTES = 8192
REQUEST_S = 5.0  # seconds that a request may take to arrive, and its response to be taken
LONGEST_WAIT_S = 30.0  # the longest that a request for news (`/status.json?wait=S`) is held
DOCUMENT_S = 0.25  # seconds for which a document is used again, so that many readers cost no more than a few
CLOSE_S = 0.5  # seconds that readers have at the end of the job to ask for the final state, and then to take it
ASKS_AGAIN_S = 1.0  # seconds after an answer that had to wait for news within which its reader is expected to ask again
_LOOK_S, _ACCEPT_S = 0.02, 0.5
_READ_BYTES = 1 << 16  # of a request that is too long too: one with unread bytes would be reset
PORTS_TRIED = 16

_PAGE = Path(__file__).with_name("status_page.html")
_OURS: set[int] = set()  # ports at which status pages of this process listen
_ours_lock = threading.Lock()

_HEADERS = {
    "Cache-Control": "no-store",
    "Connection": "close",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True, slots=True)
class PageResponse:
    """An HTTP response without the headers that all of them have."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self, *, with_body: bool) -> bytes:
        """Return the bytes of the response; without its body for HEAD."""
        headers = {
            "Content-Type": self.content_type,
            "Content-Length": str(len(self.body)),
            "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
            **_HEADERS,
            **self.headers,
        }
        first = f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"
        lines = [first, *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        return "\r\n".join(lines).encode("latin-1") + (self.body if with_body else b"")


class RefusedRequest(Exception):
    """A request that is refused."""

    def __init__(self, status: int, why: str, **headers: str) -> None:
        super().__init__(why)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.response = PageResponse(status, f"{why}\n".encode(), headers=named)


@dataclass(frozen=True, slots=True)
class PageRequest:
    """The parts of an HTTP request that matter here."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]  # by name in lower case; of several with one name, the last

    @classmethod
    def parse(cls, head: bytes) -> PageRequest:
        """Parse the bytes up to the empty line after the headers. Raise RefusedRequest if they are no HTTP request."""
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        parts = first.split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1.") or not parts[1].startswith("/"):
            raise RefusedRequest(400, "not a request of HTTP/1.1")
        headers = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
                raise RefusedRequest(400, "a header is malformed")
            headers[name.lower()] = value.strip()
        try:
            target = urlsplit(parts[1])
            query = {name: values[-1] for name, values in parse_qs(target.query, max_num_fields=20).items()}
        except ValueError:
            raise RefusedRequest(400, "the address is malformed") from None
        return cls(parts[0], target.path, query, headers)


class StatusServer:
    """Serves the status page of one job until it is closed, and with it the socket `listening`.

    A request has to show the `token`. `document` returns the present state of the job, and is called on one thread at a
    time.
    """

    def __init__(self, listening: socket.socket, host: str, token: str, document: Callable[[], Document]) -> None:
        self._listening = listening
        self._port = listening.getsockname()[1]
        self._token = token
        self._document = document
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}
        self._cached: tuple[float, Document] | None = None
        self._connections: dict[socket.socket, threading.Thread] = {}
        #: When readers that wait for news had the answer that the job runs, and have not asked again.
        self._answered: deque[float] = deque()
        self._lock = threading.Lock()  # guards the two above
        self._document_lock = threading.Lock()
        self.request_s = REQUEST_S
        self._closing, self._closed = threading.Event(), threading.Event()
        at = f"[{host}]" if ":" in host else host
        self.address = f"http://{at}:{self._port}/"
        self.url = f"{self.address}?token={token}"
        self._thread = threading.Thread(target=self._accept, name="spark_elastic-status", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Give the final state to the readers that wait for it, and end the threads and all connections."""
        self._closing.set()
        until = clock.monotonic() + CLOSE_S
        while clock.monotonic() < until and self._answered and self._answered[-1] > clock.monotonic() - ASKS_AGAIN_S:
            time.sleep(_LOOK_S)  # for readers that are between two requests
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # ends the wait for a connection at once, on Linux
        if self._thread.is_alive():
            self._thread.join()
        self._listening.close()
        with _ours_lock:
            _OURS.discard(self._port)
        until = clock.monotonic() + CLOSE_S
        for sock, thread in list(self._connections.items()):
            thread.join(max(until - clock.monotonic(), 0))
            with contextlib.suppress(OSError):  # its thread has closed it
                sock.shutdown(socket.SHUT_RDWR)
            thread.join(self.request_s)

    def _accept(self) -> None:
        self._listening.settimeout(_ACCEPT_S)
        while not self._closed.is_set():
            try:
                sock, _ = self._listening.accept()
                self._start_serving(sock)
            except TimeoutError:
                continue
            except (OSError, RuntimeError):  # the client is gone, or the process has no descriptor or thread left
                self._closed.wait(_LOOK_S)

    def _start_serving(self, sock: socket.socket) -> None:
        if len(self._connections) < MAX_CONNECTIONS:
            with self._lock:
                serve = threading.Thread(target=self._serve, args=(sock,), name="spark_elastic-page", daemon=True)
                serve.start()
                self._connections[sock] = serve
            return
        why = f"{MAX_CONNECTIONS} connections are open; try again later"
        with sock:
            sock.settimeout(REFUSAL_S)
            with contextlib.suppress(TimeoutError):
                sock.recv(_READ_BYTES)
            sock.sendall(RefusedRequest(503, why, Retry_After="2").response.encode(with_body=True))

    def _serve(self, sock: socket.socket) -> None:
        try:
            self._converse(sock)
        except OSError:
            pass  # the client is gone, or too slow to take its response
        finally:
            sock.close()
            with self._lock:
                del self._connections[sock]

    def _converse(self, sock: socket.socket) -> None:
        with_body = True
        try:
            request = self._read(sock)
            with_body = request.method != "HEAD"
            response = self._answer(request)
        except RefusedRequest as error:
            response = error.response
        except OSError:
            raise
        except Exception:
            logger.exception("the status page could not answer")
            response = PageResponse(500, b"internal error; the driver's log has the reason\n")
        sock.settimeout(self.request_s)
        sock.sendall(response.encode(with_body=with_body))

    def _read(self, sock: socket.socket) -> PageRequest:
        """Read a request. One beyond the limit is read too: a reset would keep its refusal from the client."""
        received, part, late, until = b"", b"-", False, clock.monotonic() + self.request_s
        while part and b"\r\n\r\n" not in received and len(received) <= MAX_REQUEST_BYTES:
            sock.settimeout(max(until - clock.monotonic(), 0.001))
            try:
                part = sock.recv(_READ_BYTES)
            except TimeoutError:
                part, late = b"", True
            received += part
        head, end, _ = received.partition(b"\r\n\r\n")
        if len(received) > MAX_REQUEST_BYTES:
            raise RefusedRequest(431, f"a request has at most {MAX_REQUEST_BYTES} bytes")
        if late:
            raise RefusedRequest(408, f"the request did not arrive within {self.request_s:.0f} s")
        if not end:
            raise ConnectionAbortedError
        return PageRequest.parse(head)

    def _answer(self, request: PageRequest) -> PageResponse:
        if request.method not in ("GET", "HEAD"):
            raise RefusedRequest(405, "only GET and HEAD are answered", Allow="GET, HEAD")
        self._check_host(request)
        self._check_token(request)
        match request.path:
            case "/":
                return page()
            case "/status.json":
                waits = self._wait(request)
                document = self._present()
                if waits and document["ended"] is None:
                    with self._lock:
                        self._answered.append(clock.monotonic())
                body = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
                return PageResponse(200, body, "application/json")
            case "/metrics":
                return PageResponse(200, metrics_text(self._present()).encode(), METRICS_TYPE)
        raise RefusedRequest(404, "there are /, /status.json and /metrics")

    def _check_host(self, request: PageRequest) -> None:
        """Refuse requests for a foreign name: a web page whose name was rebound to this address sends such ones."""
        given = request.headers.get("host", "").lower()
        name = given.rpartition(":")[0] if re.search(r":\d*$", given) else given
        if name not in self._names and not is_address(name.strip("[]")):
            shown = re.sub(r"[^\w.:-]", "?", given)[:100]
            raise RefusedRequest(421, f"this is not {shown or 'what was asked for'}; use the address that was printed")

    def _check_token(self, request: PageRequest) -> None:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        shown = bearer.strip() if scheme.lower() == "bearer" else request.query.get("token", "")
        if not hmac.compare_digest(shown.encode("utf-8", "replace"), self._token.encode()):
            why = "the token is missing or wrong: add ?token=... as in the line that the driver program printed"
            raise RefusedRequest(401, f"{why}, or an Authorization: Bearer header", WWW_Authenticate="Bearer")

    def _wait(self, request: PageRequest) -> bool:
        """Hold a request for news until its `wait` seconds have passed, or the job is over; False: it is none."""
        try:
            seconds = min(float(request.query.get("wait", "0")), LONGEST_WAIT_S)
        except ValueError:
            raise RefusedRequest(400, "wait is a number of seconds") from None
        if not seconds > 0:
            return False
        with self._lock:
            while self._answered and self._answered[0] < clock.monotonic() - ASKS_AGAIN_S:
                self._answered.popleft()  # its reader has gone
            if self._answered:
                self._answered.popleft()
        self._closing.wait(seconds)
        return True

    def _present(self) -> Document:
        with self._document_lock:
            if self._cached is None or self._closing.is_set() or clock.monotonic() - self._cached[0] > DOCUMENT_S:
                self._cached = (clock.monotonic(), self._document())
            return self._cached[1]


def listen_for_pages(host: str, port: int) -> socket.socket:
    """Return a socket that listens at a port for a status page; 0: any free port.

    If another status page of this process has the port, as in fits side by side, the next free one is taken.

    Raises:
        InvalidSettingsError: Another program has the port, or it is not allowed.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    last = min(port + PORTS_TRIED, 65536) if port else 1
    with _ours_lock:
        for candidate in range(port, last):
            if candidate in _OURS:
                continue
            try:
                made = socket.create_server((host, candidate), family=family, backlog=1024, dualstack_ipv6=host == "::")
            except OSError as error:
                if candidate > port:  # not the one that was asked for
                    continue
                fix = "give another port, 0 for any free one, or None for no status page"
                problem = f"status_port={port}: the driver cannot listen at {host}:{port}"
                raise InvalidSettingsError(f"{problem}: {error.strerror or error}; {fix}") from None
            _OURS.add(made.getsockname()[1])
            return made
    tried = f"ports {port} to {last - 1} are all taken, the first by another job of this program"
    raise InvalidSettingsError(f"status_port={port}: {tried}; give 0 for any free port")


def make_token(environ: Mapping[str, str] = os.environ) -> str:
    """Return a random token of 128 bits, or that of the environment; raise InvalidSettingsError for a bad one."""
    given = environ.get(TOKEN_VARIABLE)
    if given is None:
        return secrets.token_urlsafe(16)
    if not re.fullmatch(r"[A-Za-z0-9_-]{16,}", given):  # the value is a secret, and stays out of the message
        raise InvalidSettingsError(
            f"{TOKEN_VARIABLE} must have at least 16 letters, digits, '_' or '-'; the one that is set has "
            f"{len(given)} characters. `python -c 'import secrets; print(secrets.token_urlsafe())'` makes one"
        )
    return given


def page() -> PageResponse:
    """Return the page, which may run its own script and load nothing from elsewhere."""
    text = _PAGE.read_text(encoding="utf-8")
    policy = "connect-src 'self'; img-src data:"
    for tag in ("script", "style"):
        digests = [hashlib.sha256(each.encode()).digest() for each in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)]
        policy += f"; {tag}-src " + " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in digests)
    for nothing in ("default-src", "base-uri", "form-action", "frame-ancestors"):
        policy += f"; {nothing} 'none'"
    return PageResponse(200, text.encode(), "text/html; charset=utf-8", {"Content-Security-Policy": policy})
