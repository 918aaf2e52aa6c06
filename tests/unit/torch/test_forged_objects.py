"""What a peer claims about an object is believed only if a worker of this job has signed it."""

import torch

import spark_elastic.torch as hvd
from spark_elastic.collective import objects
from spark_elastic.collective.calls import agree
from spark_elastic.collective.process import process
from tests.unit.torch.test_mismatches import raised
from tests.unit.worlds import together

CLAIMED = (1 << 60).to_bytes(8, "big")
"""More than can be allocated: an attempt fails with another error."""


def forged_broadcast():
    hvd.init()
    group = process.group()
    if hvd.rank() == 0:
        agree(group, "broadcast_object", "root_rank=0")
        group.objects += 1
        group.wait(group.broadcast(objects._tensor(CLAIMED + bytes(32)), 0))
        return None
    return raised(lambda: hvd.broadcast_object(None, 0))


def forged_allgather():
    hvd.init()
    group = process.group()
    if hvd.rank() == 0:
        agree(group, "allgather_object")
        group.objects += 1
        everyone = torch.empty((2, 40), dtype=torch.uint8)
        group.wait(group.allgather(everyone.view(-1), objects._tensor(CLAIMED + bytes(32))))
        return None
    return raised(lambda: hvd.allgather_object("x"))


def of_another_kind():
    """A length that is signed, but for another object of the same job."""
    hvd.init()
    group = process.group()
    if hvd.rank() == 0:
        old = objects._signed(objects._LENGTH, CLAIMED, group)
        agree(group, "broadcast_object", "root_rank=0")
        group.objects += 1
        group.wait(group.broadcast(objects._tensor(old), 0))
        return None
    return raised(lambda: hvd.broadcast_object(None, 0))


def test_nothing_is_allocated_for_a_length_without_a_valid_mac():
    for function in (forged_broadcast, forged_allgather, of_another_kind):
        _, error = together(function)
        assert error is not None
        assert error[0] == "AuthenticationError"
        assert "length" in error[1]


def sizes():
    hvd.init()
    out = []
    for count in (0, 1, 16_384, 100_000):
        data = bytes([hvd.rank()]) * count
        out.append(hvd.broadcast_object(data, 1) == b"\1" * count)
        out.append(hvd.allgather_object(data[: count * hvd.rank()]) == [b"", b"\1" * count])
    return out


def test_objects_of_every_size_arrive():
    for checks in together(sizes):
        assert all(checks), checks
