"""The status page of a job: a small HTTP server on its own thread, with the page, its JSON and Prometheus's metrics.

It answers GET and HEAD for whoever knows the token, and only reads: nothing about the job can be changed through it.
One thread with an event loop serves all connections; their number, the size of a request and the time for it are
limited, and each response closes its connection. At the end of the job, requests that wait for news get the final
state, so that a page which is open says how the job ended.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import re
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from spark_elastic import clock
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.reporting.job_status import Document
from spark_elastic.reporting.prometheus import CONTENT_TYPE as METRICS_TYPE
from spark_elastic.reporting.prometheus import metrics_text

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "SPARK_ELASTIC_STATUS_TOKEN"
"""Environment variable of the driver with a token to use instead of a random one."""
MAX_CONNECTIONS, MAX_REFUSALS = 64, 16
"""Connections that are served at a time, and those beyond that are held until they have their 503."""
MAX_REQUEST_BYTES = 8192
REQUEST_S = 5.0
"""Seconds that a request may take to arrive, and its response to be taken."""
LONGEST_WAIT_S = 30.0
"""The longest that a request for news (`/status.json?wait=S`) is held."""
DOCUMENT_S = 0.25
"""Seconds for which a document is used again, so that many readers cost no more than a few."""
CLOSE_S = 0.5
"""Seconds that the connections have at the end of the job to take their responses."""
ASKS_AGAIN_S = 1.0
"""Seconds after an answer that had to wait for news within which its reader is expected to ask again."""
_LOOK_S = 0.02
PORTS_TRIED = 16

_PAGE = Path(__file__).with_name("status_page.html")
_OURS: set[int] = set()
"""Ports at which status pages of this process listen."""
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
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    421: "Misdirected Request",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
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
        lines = [f"HTTP/1.1 {self.status} {_REASONS[self.status]}", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
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
    headers: Mapping[str, str]
    """By name in lower case; of several with one name, the last."""

    @classmethod
    def parse(cls, head: bytes) -> PageRequest:
        """Parse the bytes up to the empty line after the headers.

        Raises:
            RefusedRequest: They are not an HTTP request.
        """
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
    """Serves the status page of one job until it is closed.

    Args:
        listening: The bound socket. The server closes it.
        host: The name or address of this machine in the page's URL.
        token: What a request has to show.
        document: Returns the present state of the job. Called on the server's thread.
    """

    def __init__(self, listening: socket.socket, host: str, token: str, document: Callable[[], Document]) -> None:
        self._listening = listening
        self._port = listening.getsockname()[1]
        self._token = token
        self._document = document
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}
        self._cached: tuple[float, Document] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._refused: list[asyncio.Event] = []
        """Of each connection beyond the limit, the oldest first: set, it is answered without its request."""
        self._answered: deque[float] = deque()
        """When readers that wait for news were told that the job runs, and have not asked again."""
        self._closing: asyncio.Event
        self._loop: asyncio.AbstractEventLoop | None = None
        self._up = threading.Event()
        at = f"[{host}]" if ":" in host else host
        self.address = f"http://{at}:{self._port}/"
        self._thread = threading.Thread(target=self._run, name="spark_elastic-status", daemon=True)

    @property
    def url(self) -> str:
        """The URL of the page, with the token."""
        return f"{self.address}?token={self._token}"

    def start(self) -> None:
        self._thread.start()
        self._up.wait(REQUEST_S)

    def close(self) -> None:
        """Give the final state to the requests that wait for it, and end the thread and all connections."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                loop.call_soon_threadsafe(self._closing.set)
        if self._thread.is_alive():
            self._thread.join(CLOSE_S + REQUEST_S)
        self._listening.close()
        with _ours_lock:
            _OURS.discard(self._port)

    # --- the server's thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:  # the page is a convenience: without it the job still runs
            logger.exception("the status page at %s has ended", self.address)
        finally:
            self._up.set()

    async def _serve(self) -> None:
        self._closing = asyncio.Event()
        self._listening.setblocking(False)
        self._loop = asyncio.get_running_loop()
        accepting = self._loop.create_task(self._accept())
        self._up.set()
        try:
            await self._closing.wait()
            await self._let_readers_return()
        finally:
            accepting.cancel()
            if self._connections:
                _, late = await asyncio.wait(self._connections, timeout=CLOSE_S)
                for task in late:
                    task.cancel()
                await asyncio.gather(*late, return_exceptions=True)

    async def _let_readers_return(self) -> None:
        """Keep listening for readers that are between two requests, or they would not learn how the job ended."""
        until = clock.monotonic() + CLOSE_S
        while clock.monotonic() < until and self._answered and self._answered[-1] > clock.monotonic() - ASKS_AGAIN_S:
            await asyncio.sleep(_LOOK_S)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listening)
            except OSError:  # the client is gone, or the process has no descriptor left
                await asyncio.sleep(_LOOK_S)
                continue
            displaced = asyncio.Event()
            full = len(self._connections) - len(self._refused) >= MAX_CONNECTIONS
            if full:
                self._refused.append(displaced)
                if len(self._refused) > MAX_REFUSALS:
                    self._refused[0].set()
            self._connections.add(loop.create_task(self._connected(sock, displaced if full else None)))
            while len(self._connections) > MAX_CONNECTIONS + MAX_REFUSALS:
                await asyncio.wait(self._connections, return_when=asyncio.FIRST_COMPLETED)

    async def _connected(self, sock: socket.socket, displaced: asyncio.Event | None) -> None:
        """Serve a connection; refuse it if an event is given, at the latest when that is set."""
        task = asyncio.current_task()
        assert task is not None
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection(sock=sock, limit=MAX_REQUEST_BYTES)
            await self._converse(reader, writer, displaced)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            pass  # the client is gone, or too slow
        except asyncio.CancelledError:
            pass  # the job is over
        finally:
            self._connections.discard(task)
            if displaced is not None:
                self._refused.remove(displaced)
            if writer is None:
                sock.close()
            else:
                writer.transport.abort()  # no effect if it is closed; a slow client loses its response

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, displaced: asyncio.Event | None
    ) -> None:
        with_body = True
        try:
            if displaced is not None:
                # a connection that is closed with a request unread is reset, and its client never sees the answer
                either = [asyncio.ensure_future(each) for each in (reader.readuntil(b"\r\n\r\n"), displaced.wait())]
                await asyncio.wait(either, timeout=REQUEST_S, return_when=asyncio.FIRST_COMPLETED)
                for each in either:
                    each.cancel()
                await asyncio.gather(*either, return_exceptions=True)
                raise RefusedRequest(503, f"{MAX_CONNECTIONS} connections are open; try again later", Retry_After="2")
            request = await self._read(reader)
            with_body = request.method != "HEAD"
            response = await self._answer(request)
        except RefusedRequest as error:
            response = error.response
        except (OSError, asyncio.IncompleteReadError):
            raise
        except Exception:
            logger.exception("the status page could not answer")
            response = PageResponse(500, b"internal error; the driver's log has the reason\n")
        writer.write(response.encode(with_body=with_body))
        writer.close()
        await asyncio.wait_for(writer.wait_closed(), REQUEST_S)

    async def _read(self, reader: asyncio.StreamReader) -> PageRequest:
        try:
            return PageRequest.parse(await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_S))
        except asyncio.LimitOverrunError:
            raise RefusedRequest(431, f"a request has at most {MAX_REQUEST_BYTES} bytes") from None
        except asyncio.TimeoutError:
            raise RefusedRequest(408, f"the request did not arrive within {REQUEST_S:.0f} s") from None

    async def _answer(self, request: PageRequest) -> PageResponse:
        if request.method not in ("GET", "HEAD"):
            raise RefusedRequest(405, "only GET and HEAD are answered", Allow="GET, HEAD")
        self._check_host(request)
        self._check_token(request)
        match request.path:
            case "/":
                return page()
            case "/status.json":
                waits = await self._wait(request)
                document = self._present()
                if waits and document["ended"] is None:
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
        if name not in self._names and not _is_address(name.strip("[]")):
            shown = re.sub(r"[^\w.:-]", "?", given)[:100]
            raise RefusedRequest(421, f"this is not {shown or 'what was asked for'}; use the address that was printed")

    def _check_token(self, request: PageRequest) -> None:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        shown = bearer.strip() if scheme.lower() == "bearer" else request.query.get("token", "")
        if not hmac.compare_digest(shown.encode("utf-8", "replace"), self._token.encode()):
            why = "the token is missing or wrong: add ?token=... as in the line that the driver program printed"
            raise RefusedRequest(401, f"{why}, or an Authorization: Bearer header", WWW_Authenticate="Bearer")

    async def _wait(self, request: PageRequest) -> bool:
        """Hold a request for news until its `wait` seconds have passed, or the job is over.

        Returns:
            Whether it is such a request.
        """
        try:
            seconds = min(float(request.query.get("wait", "0")), LONGEST_WAIT_S)
        except ValueError:
            raise RefusedRequest(400, "wait is a number of seconds") from None
        if not seconds > 0:
            return False
        while self._answered and self._answered[0] < clock.monotonic() - ASKS_AGAIN_S:
            self._answered.popleft()  # its reader has gone
        if self._answered:
            self._answered.popleft()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)
        return True

    def _present(self) -> Document:
        now = clock.monotonic()
        if self._cached is None or self._closing.is_set() or now - self._cached[0] > DOCUMENT_S:
            self._cached = (now, self._document())
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
    """Return a random token of 128 bits, or the one of the environment.

    Raises:
        InvalidSettingsError: That of the environment is too short, or not made of letters, digits, `_` and `-`.
    """
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
    policy = {
        "default-src": ["'none'"],
        "script-src": list(_hashes("script", text)),
        "style-src": list(_hashes("style", text)),
        "connect-src": ["'self'"],
        "img-src": ["data:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
        "frame-ancestors": ["'none'"],
    }
    header = "; ".join(f"{name} {' '.join(values)}" for name, values in policy.items())
    return PageResponse(200, text.encode(), "text/html; charset=utf-8", {"Content-Security-Policy": header})


def _hashes(tag: str, text: str) -> Iterator[str]:
    for inline in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL):
        yield f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
