"""The server of the status page: what it answers, what it refuses, and that nothing of it is left."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from spark_elastic.driver.status_server import (
    MAX_CONNECTIONS,
    TOKEN_VARIABLE,
    StatusServer,
    listen_for_pages,
    make_token,
    page,
)
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.membership.timeline import JobEnded
from spark_elastic.reporting.job_status import JobStatus, StatusModel
from spark_elastic.settings import ElasticSettings
from tests.leftovers import Before
from tests.unit.reporting.exposition import read

TOKEN = "a-token-of-16-letters"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def model() -> StatusModel:
    return StatusModel("7-1", ElasticSettings(4, 2, 4), time.monotonic())


@pytest.fixture
def server(model: StatusModel) -> Iterator[StatusServer]:
    def document() -> Any:
        return model.document(JobStatus("running", 1, 2, 10, "", 2), [], [], time.monotonic(), time.time())

    before = Before()
    made = StatusServer(listen_for_pages("127.0.0.1", 0), "127.0.0.1", TOKEN, document)
    made.start()
    yield made
    made.close()
    before.assert_nothing_left()


def port_of(server: StatusServer) -> int:
    return int(server.address.rpartition(":")[2].strip("/"))


def ask(server: StatusServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def raw(server: StatusServer, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=20) as connection:
        connection.sendall(sent)
        parts = []
        try:
            while part := connection.recv(65536):
                parts.append(part)
        except ConnectionResetError:  # it closed before it had read all
            pass
        return b"".join(parts)


@pytest.mark.parametrize("path", ["/", "/status.json", "/metrics"])
def test_token_is_accepted_as_a_parameter_and_as_a_header(server: StatusServer, path: str) -> None:
    assert ask(server, f"{path}?token={TOKEN}")[0] == 200
    status, headers, body = ask(server, path, **BEARER)
    assert status == 200
    assert int(headers["content-length"]) == len(body)
    assert headers["cache-control"] == "no-store"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path", ["/", "/status.json", "/metrics", "/other", "/?token=", "/?token=wr%C3%B6ng", f"/?token={TOKEN}x"]
)
def test_without_the_right_token_nothing_is_told(server: StatusServer, path: str) -> None:
    status, headers, body = ask(server, path)
    assert status == 401
    assert headers["www-authenticate"] == "Bearer"
    assert b"7-1" not in body
    assert TOKEN.encode() not in body
    assert ask(server, path.partition("?")[0], Authorization="Bearer wrong")[0] == 401


def test_json_and_metrics_are_well_formed(server: StatusServer) -> None:
    _, headers, body = ask(server, "/status.json", **BEARER)
    assert headers["content-type"] == "application/json"
    assert json.loads(body)["job"] == "7-1"
    _, headers, body = ask(server, "/metrics", **BEARER)
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "spark_elastic_workers" in read(body.decode())


def test_head_has_the_headers_alone(server: StatusServer) -> None:
    status, headers, body = ask(server, "/", "HEAD", **BEARER)
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) == len(page().body)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT"])
def test_other_methods_are_refused(server: StatusServer, method: str) -> None:
    status, headers, _ = ask(server, "/", method, **BEARER)
    assert (status, headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "a b"])
def test_foreign_host_names_are_refused(server: StatusServer, host: str) -> None:
    assert ask(server, "/status.json", Host=host, **BEARER)[0] == 421


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:9999", "127.0.0.1", "10.1.2.3:80", "[::1]:8080", socket.gethostname()]
)
def test_addresses_and_names_of_this_machine_are_accepted(server: StatusServer, host: str) -> None:
    assert ask(server, "/status.json", Host=host, **BEARER)[0] == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", b"431"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET http://x/ HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost 127.0.0.1\r\n\r\n", b"400"),
        (b"GET //[x/ HTTP/1.1\r\nHost: localhost\r\n\r\n", b"400"),
        (b"GET /?" + b"&".join(b"a%d=1" % n for n in range(50)) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"400"),
        (b"GET /status.json?wait=x&token=" + TOKEN.encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"400"),
    ],
)
def test_malformed_and_large_requests_are_refused(server: StatusServer, sent: bytes, status: bytes) -> None:
    assert raw(server, sent).startswith(b"HTTP/1.1 " + status)
    assert ask(server, "/status.json", **BEARER)[0] == 200, "it still serves others"


def test_slow_request_is_ended(server: StatusServer) -> None:
    server.request_s = 0.2
    assert raw(server, b"GET / HTTP/1.1\r\nHost:").startswith(b"HTTP/1.1 408")


def test_connections_beyond_the_limit_are_refused(server: StatusServer) -> None:
    held = [socket.create_connection(("127.0.0.1", port_of(server)), timeout=20) for _ in range(MAX_CONNECTIONS)]
    try:
        assert ask(server, "/status.json", **BEARER)[0] == 503
    finally:
        for each in held:
            each.close()
    until = time.monotonic() + 10
    while ask(server, "/status.json", **BEARER)[0] == 503 and time.monotonic() < until:
        time.sleep(0.01)
    assert ask(server, "/status.json", **BEARER)[0] == 200


def test_request_for_news_gets_the_final_state_when_the_job_ends(server: StatusServer, model: StatusModel) -> None:
    answers = []
    asking = threading.Thread(target=lambda: answers.append(ask(server, "/status.json?wait=30", **BEARER)))
    asking.start()
    until = time.monotonic() + 10
    while not server._connections and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)  # the request is read
    model.record(JobEnded(time.monotonic(), "finished", "4 workers are done"), 4)
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < 5
    asking.join(10)
    assert json.loads(answers[0][2])["phase"] == "finished"
    with pytest.raises(ConnectionRefusedError):
        ask(server, "/")


def test_document_that_cannot_be_made_is_an_error_of_the_server_alone(caplog: pytest.LogCaptureFixture) -> None:
    def document() -> Any:
        raise KeyError("planted")

    made = StatusServer(listen_for_pages("127.0.0.1", 0), "127.0.0.1", TOKEN, document)
    made.start()
    try:
        status, _, body = ask(made, "/status.json", **BEARER)
        assert (status, b"planted" in body) == (500, False)
        assert ask(made, "/", **BEARER)[0] == 200
    finally:
        made.close()
    assert "planted" in caplog.text


def test_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            InvalidSettingsError, match=rf"status_port={port}: .* cannot listen at 127.0.0.1:{port}: .*in use.*0 for"
        ):
            listen_for_pages("127.0.0.1", port)


def test_page_loads_nothing_from_elsewhere_and_its_policy_names_its_own_script() -> None:
    served = page()
    text = served.body.decode()
    policy = served.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert policy.count("'sha256-") == 2
    assert "unsafe" not in policy
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", " style=", " onclick"):
        assert sink not in text, sink


def test_random_tokens_differ_and_a_given_one_is_checked_without_being_shown() -> None:
    assert make_token({}) != make_token({})
    assert len(make_token({})) >= 22
    assert make_token({TOKEN_VARIABLE: "0123456789abcdef"}) == "0123456789abcdef"
    for wrong in ("short", "", "with a space in it!!", "x" * 15):
        with pytest.raises(InvalidSettingsError, match="at least 16") as caught:
            make_token({TOKEN_VARIABLE: wrong})
        assert not wrong or wrong not in str(caught.value)
