"""Short runs of `tests/storms/fuzz.py`: hostile frames against a server, and hostile files against their readers."""

import random

import pytest

from spark_elastic.errors import ProtocolError
from spark_elastic.wire import messages as wire
from spark_elastic.wire.encoding import decode
from tests.nightly import by_night
from tests.storms import hostile_documents as documents
from tests.storms import hostile_frames as frames
from tests.unit.driver.test_rendezvous_server import HELLO, Served


def test_rubbish_is_a_message_or_a_protocol_error():
    rng, errors, messages = random.Random(5), [], 0
    for _ in range(4000):
        try:
            assert isinstance(decode(frames.rubbish(rng)), wire.Message)
            messages += 1
        except ProtocolError as error:
            errors.append(str(error))
    assert messages > 100
    assert len(errors) > 100
    assert max(map(len, errors)) < 1000


def test_strangers_are_judged_and_a_real_peer_gets_in(caplog):
    served = Served()
    try:
        stranger = frames.Stranger(served.address, frames.attempts(served.key, seed=7))
        stranger.attack(300)
        assert not stranger.unanswered
        assert len(stranger.judged) > 8  # kinds of attacks
        _, inbox = served.client(HELLO)
        inbox.wait_for("message", wire.Welcome(1.0, 6.0, 60.0))
    finally:
        served.close()
    assert [record for record in caplog.records if record.exc_info or record.name == "asyncio"] == []


@pytest.mark.parametrize(("seed", "count"), by_night([(1, 200), (2, 600)], but=[(1, 200)]))
def test_a_hostile_file_is_opened_or_refused_with_an_error_of_ours(seed, count):
    found = documents.attack_documents(count, seed)
    for kind, findings in found.items():
        assert findings.problems() == [], kind
        assert findings.opened, kind
        assert findings.refused, kind
