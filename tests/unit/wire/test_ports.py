from __future__ import annotations

import contextlib
import socket

import pytest

from spark_elastic.errors import InvalidSettingsError, PortsTakenError
from spark_elastic.wire.ports import ANY, Ports, listen, split_port, valid_ports, with_port


@pytest.mark.parametrize(
    ("value", "ports"),
    [(0, ANY), ("0", ANY), (40000, (40000, 40000)), ("40000-40015", (40000, 40015)), (" 5 - 7 ", (5, 7))],
)
def test_ports_are_a_number_or_a_range(value, ports):
    assert Ports.parse(value) == ports


@pytest.mark.parametrize("value", ["", "http", "7-5", "0-5", 65536, "1-70000", -1, "1,2", True, 1.5, None, (1, 2)])
def test_other_values_are_refused_with_the_name_of_the_setting(value):
    with pytest.raises(InvalidSettingsError, match="driver_port"):
        valid_ports("driver_port", value)


def free_range(count: int) -> tuple[list[socket.socket], Ports]:
    """Occupy ports that follow one another, so that a test can release those that it wants to be free."""
    for _ in range(100):
        with contextlib.ExitStack() as undo:
            held = [undo.enter_context(socket.create_server(("127.0.0.1", 0)))]
            first = held[0].getsockname()[1]
            try:
                for port in range(first + 1, first + count):
                    held.append(undo.enter_context(socket.create_server(("127.0.0.1", port))))
            except (OSError, OverflowError):
                continue
            undo.pop_all()
            return held, Ports(first, first + count - 1)
    raise AssertionError("no free ports in a row")


def test_free_port_of_a_range_is_found_and_an_exhausted_range_reported_with_its_numbers():
    held, ports = free_range(4)
    held.pop(2).close()
    with contextlib.ExitStack() as undo:
        for each in held:
            undo.enter_context(each)
        found = undo.enter_context(listen("127.0.0.1", ports, "driver_port", 5))
        assert found.getsockname()[1] == ports.first + 2
        with pytest.raises(PortsTakenError, match=f"all 4 ports of driver_port='{ports}' are taken at 127.0.0.1"):
            listen("127.0.0.1", ports, "driver_port", 5)


def test_single_port_that_is_taken_suggests_a_range():
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with pytest.raises(PortsTakenError, match=f"port {port} of driver_port is taken .* give a range, such as"):
            listen("127.0.0.1", Ports(port, port), "driver_port", 5)


@pytest.mark.parametrize(
    ("bind", "reached_at"),
    [("::1", ["::1"]), ("[::1]", ["::1"]), ("::", ["::1", "127.0.0.1"]), ("0.0.0.0", ["127.0.0.1"])],
)
def test_both_protocols_are_listened_to(bind, reached_at):
    with listen(bind, ANY, "driver_port", 5) as server:
        for address in reached_at:
            socket.create_connection((address, server.getsockname()[1]), 5).close()


@pytest.mark.parametrize(("host", "text"), [("10.0.0.7", "10.0.0.7:80"), ("fd00::7", "[fd00::7]:80"), ("h", "h:80")])
def test_addresses_with_ports(host, text):
    assert with_port(host, 80) == text
    assert split_port(text) == (host, 80)
