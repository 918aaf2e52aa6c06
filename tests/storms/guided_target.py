"""One target of `fuzz_guided.py`, in a process of its own: `python guided_target.py TARGET SECONDS SEED RESULT`.

It writes what it found to RESULT, JSON, and ends by itself. libFuzzer's own lines go to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import atheris

INSTRUMENTED = {
    "wire-frames": ["spark_elastic.wire.framing"],
    "wire-messages": ["spark_elastic.wire"],
    "key-values": ["spark_elastic.driver.rendezvous_server"],
    "manifests": ["spark_elastic.data.manifest", "spark_elastic.data.dataset", "spark_elastic.data.files"],
    "checkpoints": ["spark_elastic.runs.checkpoints", "spark_elastic.data.manifest"],
    "models": [
        *("spark_elastic.ml.persistence", "spark_elastic.ml.saved_folder", "spark_elastic.ml.model"),
        *("spark_elastic.ml.torch.model", "spark_elastic.ml.torch.serialization", "spark_elastic.runs.trust"),
        *("spark_elastic.ml.params", "spark_elastic.ml.shared_params", "spark_elastic.data.manifest"),
    ],
}
"""By target, the modules whose branches guide it: to instrument all takes longer than to fuzz."""

with atheris.instrument_imports(include=INSTRUMENTED[sys.argv[1]]):
    from spark_elastic.driver.rendezvous_server import MAX_ROUND_BYTES, RoundKeyValues
    from spark_elastic.errors import ProtocolError
    from spark_elastic.wire.encoding import decode, encode
    from spark_elastic.wire.framing import Connection
    from spark_elastic.wire.messages import Message
    from tests.storms import hostile_frames as frames
    from tests.storms.hostile_judge import Findings, usage

    if sys.argv[1] in ("manifests", "checkpoints", "models"):
        from tests.storms import hostile_documents as documents

LONGEST_INPUT = 1 << 16
WARM_SHARE = 0.25
"""Of the time: what is allocated until then is no growth."""
SLOW_S = 5.0
"""An input that takes longer than this to judge is a problem."""
KEY = bytes(range(32))
LARGE = bytes(MAX_ROUND_BYTES // 3 + 1)


@dataclass
class Guided:
    """What is fuzzed: `judge` meets one input and raises only errors of this package.

    Attributes:
        seeds: Valid inputs to begin with.
        mutate: Returns a structured mutation of an input; None: bytes are changed only.
    """

    seeds: list[bytes]
    judge: Callable[[bytes], object]
    mutate: Callable[[bytes, random.Random], bytes] | None = None


# --- the wire -------------------------------------------------------------------------------------------


def wire_frames() -> Guided:
    """Bytes that arrive in pieces, at both ends of a connection, before and after the handshake.

    The first byte chooses the end and the state, the second one the size of the pieces. Behind a finished handshake the
    bytes are a stream of frames; in one state out of four they are bodies, whose frames get the right MAC.
    """

    def judge(data: bytes) -> None:
        if len(data) < 2:
            return
        state, size, rest = data[0] % 4, 1 + data[1], data[2:]
        server, client = Connection(KEY, server=True), Connection(KEY, server=False)
        near = client if state == 1 else server
        if state >= 2:
            greeted = server.receive(client.start())[1]
            welcome = server.receive(client.receive(greeted)[1])[1]
            client.receive(welcome)
            assert server.authenticated
            assert client.authenticated
        else:
            near.start()
        if state == 3:
            rest = b"".join(client.send(part) for part in rest.split(b"\0"))
        got = []
        for at in range(0, len(rest), size):
            got += near.receive(rest[at : at + size])[0]
        if state == 3:
            assert got == data[2:].split(b"\0"), "a frame has arrived otherwise than it was sent"
        elif state < 2:
            assert not near.authenticated, "a stranger got in without the key"

    client = Connection(KEY, server=False)
    greeting = client.start()
    seeds = [
        bytes([state, 40]) + body for state in range(4) for body in (greeting + bytes(80), b"\0\0\0\1" + bytes(17))
    ]
    return Guided(seeds, judge)


def wire_messages() -> Guided:
    """Bodies of frames: each is a message, which is the same when it is sent on, or a `ProtocolError`."""

    def judge(data: bytes) -> None:
        message = decode(data)
        assert isinstance(message, Message)
        again = encode(message)
        assert encode(decode(again)) == again, f"{type(message).__name__} changes when it is sent on"

    def mutate(data: bytes, rng: random.Random) -> bytes:
        return frames.rubbish(rng) if rng.random() < 0.1 else frames.wrong_field(data, rng)

    return Guided([encode(each) for each in frames.EXAMPLES], judge, mutate)


def key_values() -> Guided:
    """Operations on the key-value store of a round, compared with a plain dictionary."""

    def judge(data: bytes) -> None:
        given = atheris.FuzzedDataProvider(data)
        store, round = RoundKeyValues(), 0
        model: dict[str, bytes] = {}
        waiting: list[tuple[str, list[bytes]]] = []
        for _ in range(60):
            what, of = given.ConsumeIntInRange(0, 7), round - given.ConsumeIntInRange(-1, 1)
            if what == 0:
                round += 1
                store.start_round(round)
                model, waiting = {}, []
            elif what <= 4:
                key = given.ConsumeUnicode(given.ConsumeIntInRange(0, 2))
                size = given.ConsumeIntInRange(0, 3)
                value = LARGE if size == 3 else given.ConsumeBytes(size)
                fits = sum(len(k) + len(v) for k, v in {**model, key: value}.items()) <= MAX_ROUND_BYTES
                refused = False
                try:
                    store.set(of, key, value)
                except ProtocolError:
                    refused = True
                assert refused == (of == round and not fits), "the bound of a round is another one"
                if of == round and fits:
                    model[key] = value
            else:
                key = given.ConsumeUnicode(1)
                answers: list[bytes] = []
                store.get(of, key, answers.append)
                if of == round:
                    waiting.append((key, answers))
                else:
                    assert not answers, "a request of another round is answered"
            for key, answers in waiting:
                assert len(answers) == (key in model), "a request is answered as soon as its key is set, and once"
            waiting = [(key, answers) for key, answers in waiting if not answers]

    return Guided([bytes(range(200)), bytes(200), b"\7\1a" * 60], judge)


# --- files ----------------------------------------------------------------------------------------------


def document(target: documents.Target) -> Guided:
    valid = target.file.read_bytes()

    def judge(data: bytes) -> None:
        target.file.write_bytes(data)
        target.open()

    def mutate(data: bytes, rng: random.Random) -> bytes:
        for each in (data, valid):
            with contextlib.suppress(Exception):  # what was mutated before need not be a document any more
                return documents.hostile(each, rng, target.sealed)
        return valid

    return Guided([valid], judge, mutate)


@contextlib.contextmanager
def guided(name: str) -> Iterator[Guided]:
    plain = {"wire-frames": wire_frames, "wire-messages": wire_messages, "key-values": key_values}
    if name in plain:
        yield plain[name]()
        return
    with documents.targets() as found:
        yield document(found[name])


# --- the run --------------------------------------------------------------------------------------------


def main() -> None:
    name, seconds, seed, result = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    findings = Findings()
    inputs: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(guided(name))
        corpus = stack.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-seeds-"))
        for number, each in enumerate(target.seeds):
            Path(corpus, str(number)).write_bytes(each)
        began = time.monotonic()
        before: list[tuple[float, int, int]] = []
        executions = 0
        slowest = 0.0

        def meet(data: bytes) -> None:
            nonlocal executions, slowest
            begin = time.monotonic()
            if begin - began > seconds * WARM_SHARE and not before:
                before.append(usage())
            known = findings.bare.total() + findings.unclear.total()
            findings.judge(lambda: target.judge(data))
            if findings.bare.total() + findings.unclear.total() > known and len(inputs) < 50:
                newest = [*findings.bare, *findings.unclear]
                inputs.setdefault(next((each for each in newest if each not in inputs), newest[-1]), data.hex())
            executions += 1
            now = time.monotonic()
            slowest = max(slowest, now - begin)
            if now - began > seconds:
                end()

        def end() -> None:
            findings.note_growth(before[0] if before else usage(), usage())
            if slowest > SLOW_S:
                findings.unclear[f"an input took {slowest:.1f} s"] += 1
            document = {
                **findings.as_json(),
                "problems": findings.problems(),
                "inputs": {text: data[:4000] for text, data in inputs.items()},
                "executions": executions,
                "seconds": round(time.monotonic() - began, 1),
                "slowest_ms": round(slowest * 1e3, 1),
            }
            result.write_text(json.dumps(document))
            sys.stderr.flush()
            os.chdir("/")
            stack.close()
            os._exit(0)  # libFuzzer has no other end that leaves its corpus alone

        def mutate(data: bytes, most: int, number: int) -> bytes:
            rng = random.Random(number)
            if target.mutate is None or rng.random() < 0.3:
                return bytes(atheris.Mutate(data, most))
            with contextlib.suppress(RecursionError):  # it is nested deeply already
                return target.mutate(data, rng)[:most]
            return bytes(atheris.Mutate(data, most))

        options = [f"-max_len={LONGEST_INPUT}", f"-seed={seed}", "-rss_limit_mb=4096", "-timeout=60", "-verbosity=1"]
        more = {} if target.mutate is None else {"custom_mutator": mutate}
        atheris.Setup([sys.argv[0], *options, corpus], meet, **more)
        os.chdir(corpus)  # where libFuzzer would leave what crashed it
        atheris.Fuzz()


if __name__ == "__main__":
    main()
