"""Gloo's addresses: what a device announces is read, and what is written connects (see `test_worlds`)."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

import spark_elastic.torch as hvd
from spark_elastic.collective import gloo, gloo_addresses
from spark_elastic.collective.gloo_addresses import UnknownLayoutError, describe, read, restore, write
from spark_elastic.collective.process import process
from tests.unit.world_link import link
from tests.unit.worlds import WorldDriver


def announced(address: str) -> bytes:
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    store = dist.HashStore()
    ProcessGroupGloo(store, 0, 1, options)
    return bytes(store.get("0/0"))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_what_a_device_announces_is_read_and_written_again(address):
    found = read(announced(address), address)
    assert found.numbers == (0,)
    assert 1024 <= found.port < 65536
    written = write(found.host, address, found.port, range(7, 12))
    assert read(written, address) == gloo_addresses.GlooListener(found.host, found.port, (7, 8, 9, 10, 11))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_value_is_described_by_its_first_number_and_restored(address):
    value = write(b"h\xf6st", address, 4711, range(7, 1007))
    described = describe(value, address)
    assert described == ["h\xf6st", address, 4711, 7]
    assert restore(json.loads(json.dumps(described)), 1000) == value


@pytest.mark.parametrize("value", [b"a newer layout", write(b"host", "127.0.0.1", 4711, [3, 5, 6])])
def test_value_that_cannot_be_described_is_restored_too(value):
    assert restore(json.loads(json.dumps(describe(value, "127.0.0.1"))), 3) == value


def test_another_layout_is_noticed():
    value = write(b"host", "127.0.0.1", 4711, [0])
    for damaged in (
        b"",
        value[:9],
        value[:-1],
        value[:-8],
        value + b"1",
        b"\xff" * 200,
        value.replace(b"\x7f", b"\x0a"),
    ):
        with pytest.raises(UnknownLayoutError):
            read(damaged, "127.0.0.1")
    with pytest.raises(UnknownLayoutError):
        read(value, "::1")
    with pytest.raises(UnknownLayoutError, match="a name"):
        read(value, "localhost")


def connects_with_another_gloo(worker: int):
    def other(value, address):
        raise UnknownLayoutError("a newer one")

    if link().worker == worker:
        gloo_addresses.read = other
    hvd.init()
    return hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), process.assignment.endpoints


def test_members_exchange_their_addresses_if_one_of_them_cannot_read_gloos():
    with WorldDriver(start_with=2) as driver:
        driver.start(connects_with_another_gloo, 2, count=2)
        assert driver.results(2) == [(2.0, ())] * 2


def test_a_listener_is_asked_again_only_after_a_group_has_used_it():
    address = "127.0.0.1"
    gloo.give_up_device(address)
    listener, first = gloo.next_connection(address)
    assert gloo.next_connection(address) == (listener, first)
    store = dist.HashStore()
    ProcessGroupGloo(store, 0, 1, gloo.gloo_options(address))
    assert read(bytes(store.get("0/0")), address).numbers == (first,)
    after, number = gloo.next_connection(address)
    assert after.port == listener.port
    assert number > first
    gloo.give_up_device(address)
    assert gloo.next_connection(address)[0].port != listener.port
    gloo.give_up_device(address)
