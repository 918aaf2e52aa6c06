import pytest

from spark_elastic.driver.rendezvous_server import RoundKeyValues
from spark_elastic.errors import ProtocolError
from spark_elastic.wire.encoding import decode
from spark_elastic.wire.messages import KvGather, KvGathered


@pytest.fixture
def store():
    store = RoundKeyValues()
    store.start_round(1)
    return store


def test_requests_wait_for_their_key(store):
    answers = []
    store.get(1, "a", answers.append)
    store.get(1, "a", answers.append)
    assert answers == []
    store.set(1, "a", b"1")
    store.set(1, "a", b"2")
    assert answers == [b"1", b"1"]


def test_a_new_round_forgets_values_and_requests_of_the_old_one(store):
    answers = []
    store.set(1, "a", b"old")
    store.get(1, "b", answers.append)
    store.start_round(2)
    store.set(1, "b", b"late")
    store.get(2, "a", answers.append)
    assert answers == []
    store.set(2, "a", b"new")
    assert answers == [b"new"]


def test_a_worker_cannot_fill_the_drivers_memory(store):
    for key in ("a", "b", "b"):  # one that is set again counts once
        store.set(1, key, bytes(30 << 20))
    with pytest.raises(ProtocolError, match="more than 67108864 bytes"):
        store.set(1, "c", bytes(30 << 20))


def test_values_of_a_group_are_sent_to_all_members_once_the_last_has_come(store):
    answers = []
    for rank in (2, 0, 1):
        assert answers == []
        store.gather(KvGather(1, "global", rank, 3, f"value {rank}"), answers.append)
    assert [decode(body) for body in answers] == [KvGathered(1, "global", ("value 0", "value 1", "value 2"))] * 3
    assert answers[0] is answers[1] is answers[2]  # encoded once


def test_groups_of_one_round_are_apart_and_a_new_round_forgets_them(store):
    answers = []
    store.gather(KvGather(1, "one", 0, 2, "a"), answers.append)
    store.gather(KvGather(1, "other", 1, 2, "b"), answers.append)
    store.start_round(2)
    store.gather(KvGather(2, "one", 1, 2, "c"), answers.append)
    store.gather(KvGather(1, "one", 0, 2, "late"), answers.append)
    assert answers == []


def test_members_that_disagree_about_their_number_are_refused(store):
    store.gather(KvGather(1, "one", 0, 2, "a"), print)
    with pytest.raises(ProtocolError, match="a member of 'one' says that it has 3 members, not 2"):
        store.gather(KvGather(1, "one", 1, 3, "b"), print)
    with pytest.raises(ValueError, match="rank 3 of a group of 3"):
        KvGather(1, "one", 3, 3, "b")


def test_member_that_sends_its_value_again_gets_one_answer_with_the_newer_one(store):
    answers = []
    store.gather(KvGather(1, "one", 0, 2, "old"), answers.append)
    store.gather(KvGather(1, "one", 0, 2, "new"), answers.append)
    store.gather(KvGather(1, "one", 1, 2, "other"), answers.append)
    assert [decode(body) for body in answers] == [KvGathered(1, "one", ("new", "other"))] * 2
