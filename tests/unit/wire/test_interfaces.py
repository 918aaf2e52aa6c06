import socket

import pytest

from spark_elastic.wire import interfaces
from spark_elastic.wire.interfaces import address_of, interface_addresses, plain_address


@pytest.fixture
def names(monkeypatch):
    """A name server that knows the names a test puts into this dict."""
    known = {}

    def resolve(name):
        if name not in known:
            raise socket.gaierror("unknown")
        return known[name]

    def resolve_ipv6(name, *_):
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.setattr(socket, "getaddrinfo", resolve_ipv6)
    return known


def test_address_is_returned_unchanged_and_a_name_resolved(names):
    names["node1"] = "10.0.0.7"
    assert address_of("node1") == "10.0.0.7"
    assert address_of("10.0.0.7") == "10.0.0.7"
    assert address_of("fd00::2") == "fd00::2"
    assert address_of("127.0.0.2") == "127.0.0.2"
    assert address_of("unresolvable") == "unresolvable"


def test_name_that_resolves_to_loopback_gives_the_outward_address(names, monkeypatch):
    names.update({"debian1": "127.0.1.1", "localhost": "127.0.0.1"})
    monkeypatch.setattr(interfaces, "_default_address", lambda: "10.0.0.7")
    assert address_of("debian1") == "10.0.0.7"
    assert address_of("localhost") == "127.0.0.1"
    monkeypatch.setattr(interfaces, "_default_address", lambda: None)
    monkeypatch.setattr(interfaces, "interface_addresses", lambda: {"lo": ("127.0.0.1",), "eth0": ("10.0.0.8",)})
    assert address_of("debian1") == "10.0.0.8"
    monkeypatch.setattr(interfaces, "interface_addresses", lambda: {"lo": ("127.0.0.1",)})
    assert address_of("debian1") == "debian1"


def test_interfaces_include_loopback_and_have_one_address_of_each_protocol():
    found = interface_addresses()
    assert found["lo"] in (("127.0.0.1",), ("127.0.0.1", "::1"))
    for addresses in found.values():
        assert [":" in address for address in addresses] in ([False], [True], [False, True])


def test_ipv6_addresses_that_last_come_first_and_unusable_ones_not_at_all(monkeypatch, tmp_path):
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe800000000000000000000000000001 02 40 20 80   eth0\n"
        "fd000000000000000000000000000009 02 40 00 01   eth0\n"
        "fd000000000000000000000000000002 02 40 00 80   eth0\n"
        "fd000000000000000000000000000003 03 40 00 40   eth1\n"
        "fd000000000000000000000000000004 04 40 00 88   eth2\n"
    )
    monkeypatch.setattr(interfaces, "_IF_INET6", str(table))
    assert interfaces._ipv6_addresses() == {"eth0": "fd00::2"}


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("[fd00::2]", "fd00::2"),
        ("FD00:0:0::2", "fd00::2"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("10.0.0.7", "10.0.0.7"),
        ("node1", "node1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("", ""),
    ],
)
def test_addresses_have_one_form(text, plain):
    assert plain_address(text) == plain


def test_name_with_an_ipv6_address_alone_is_resolved_to_it(names, monkeypatch):
    answer = [(socket.AF_INET6, 1, 6, "", ("fd00:0::7", 0, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *_: answer)
    assert address_of("node6") == "fd00::7"
    names["node1"] = "10.0.0.7"
    assert address_of("node1") == "10.0.0.7"
