from __future__ import annotations

import socket

import pytest

from spark_elastic.wire import interfaces
from spark_elastic.wire.interfaces import address_of, interface_addresses


@pytest.fixture
def names(monkeypatch):
    """A name server that knows the names a test puts into this dict."""
    known = {}

    def resolve(name):
        if name not in known:
            raise socket.gaierror("unknown")
        return known[name]

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    return known


def test_address_is_returned_unchanged_and_a_name_resolved(names):
    names["node1"] = "10.0.0.7"
    assert address_of("node1") == "10.0.0.7"
    assert address_of("10.0.0.7") == "10.0.0.7"
    assert address_of("fd00::2") == "fd00::2"
    assert address_of("127.0.0.2") == "127.0.0.2"


def test_unresolvable_name_is_returned_unchanged(names):
    assert address_of("node9") == "node9"


def test_name_that_resolves_to_loopback_gives_the_outward_address(names, monkeypatch):
    names.update({"debian1": "127.0.1.1", "localhost": "127.0.0.1"})
    monkeypatch.setattr(interfaces, "_route_address", lambda: "10.0.0.7")
    assert address_of("debian1") == "10.0.0.7"
    assert address_of("localhost") == "127.0.0.1"
    monkeypatch.setattr(interfaces, "_route_address", lambda: None)
    monkeypatch.setattr(interfaces, "interface_addresses", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.8"})
    assert address_of("debian1") == "10.0.0.8"
    monkeypatch.setattr(interfaces, "interface_addresses", lambda: {"lo": "127.0.0.1"})
    assert address_of("debian1") == "debian1"


def test_interfaces_include_loopback_and_have_one_address_each():
    found = interface_addresses()
    assert found["lo"] == "127.0.0.1"
    assert all(address.count(".") == 3 for address in found.values())
