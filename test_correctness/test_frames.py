"""Frames that are changed, repeated, dropped, reordered or added on their way are noticed and never read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.runtime.transports.wire import (
    AgentHandshake,
    DriverHandshake,
    HandshakeRefused,
    Introduction,
    Opener,
    Sealer,
    Tampered,
)

KEY = b"0123456789abcdef"
LAUNCH = Introduction(run_id="torchrun none 29500 0", world_size=4, address="20123")
PAYLOADS = st.lists(st.binary(max_size=200), min_size=1, max_size=5)


def opened(key, stream, *, step=1 << 20):
    opener = Opener(key)
    payloads = []
    for at in range(0, len(stream), step):
        opener.feed(stream[at : at + step])
        payloads += opener.payloads()
    return payloads


def sealed(key, payloads):
    sealer = Sealer(key)
    return [sealer.seal(payload) for payload in payloads]


def refused(key, frames, payloads):
    """Whether what is not what was sent is noticed; nothing but a beginning of what was sent may be read."""
    opener = Opener(key)
    opener.feed(b"".join(frames))
    read = []
    try:
        for payload in opener.payloads():
            read.append(payload)
    except Tampered:
        assert read == payloads[: len(read)]
        return True
    assert read == payloads[: len(read)]
    return False


@given(PAYLOADS, st.integers(1, 40))
def test_what_was_sent_arrives_however_it_is_cut(payloads, step):
    assert opened(KEY, b"".join(sealed(KEY, payloads)), step=step) == payloads


@given(PAYLOADS, st.data())
def test_any_change_of_any_byte_is_refused(payloads, data):
    stream = bytearray(b"".join(sealed(KEY, payloads)))
    at = data.draw(st.integers(0, len(stream) - 1))
    stream[at] ^= data.draw(st.integers(1, 255))
    assert refused(KEY, [bytes(stream)], payloads)


@given(st.lists(st.binary(max_size=50), min_size=2, max_size=6), st.data())
def test_any_repeated_dropped_or_reordered_frame_is_refused(payloads, data):
    frames = sealed(KEY, payloads)
    order = data.draw(st.lists(st.integers(0, len(frames) - 1), min_size=1, max_size=8))
    intact = order == list(range(len(order)))
    assert refused(KEY, [frames[at] for at in order], payloads) != intact


@given(PAYLOADS, st.data())
def test_any_bytes_in_between_are_refused(payloads, data):
    stream = b"".join(sealed(KEY, payloads))
    added = data.draw(st.binary(min_size=60, max_size=100))
    at = data.draw(st.integers(0, len(stream)))
    changed = stream[:at] + added + stream[at:]
    assert changed.startswith(stream) or refused(KEY, [changed], payloads)
    assert refused(KEY, [stream, added], payloads)


@given(PAYLOADS, st.data())
def test_a_cut_stream_gives_a_beginning_and_is_known_to_be_cut(payloads, data):
    stream = b"".join(sealed(KEY, payloads))
    opener = Opener(KEY)
    opener.feed(stream[: data.draw(st.integers(0, len(stream) - 1))])
    read = list(opener.payloads())
    assert read == payloads[: len(read)]
    assert opener.amid == (len(b"".join(sealed(KEY, read))) < len(stream) and bool(opener._buffer))


def test_a_length_that_nobody_sent_takes_no_memory():
    (frame,) = sealed(KEY, [b"x"])
    with pytest.raises(Tampered):
        opened(KEY, b"\xff\xff\xff\xff" + frame[4:20])


def meet(agent_launch=LAUNCH, *, agent_key=KEY, between=lambda step, data: data):
    """Keys of both ends; ``between`` sees, and may change, each message of the handshake by its number."""
    agent, driver = AgentHandshake(agent_key, agent_launch, 1), DriverHandshake(KEY, LAUNCH)
    answer = driver.feed(between(0, agent.opening))
    proof = driver.feed(between(2, agent.prove(between(1, answer))))
    keys = agent.finish(between(3, proof))
    assert (driver.rank, driver.session) == (1, keys)
    return keys


def test_both_ends_get_the_same_keys_new_ones_each_time_and_one_per_direction():
    keys = [meet() for _ in range(3)]
    assert len({key for each in keys for key in each}) == 6


@pytest.mark.parametrize("other", [{"run_id": "another"}, {"world_size": 5}, {"address": "another"}, {}])
def test_ends_that_disagree_on_the_launch_or_the_key_do_not_meet(other):
    launch = Introduction(**{**vars(LAUNCH), **other})
    with pytest.raises(HandshakeRefused, match="another key, launch or port"):
        meet(launch, agent_key=KEY if other else b"another key of 16")


@given(st.integers(0, 3), st.data())
def test_any_change_of_the_handshake_is_refused(step, data):
    """Also of the rank, the version and the nonces, which travel in clear; no end gets keys that the other has not."""

    def change(number, message):
        if number != step:
            return message
        changed = bytearray(message)
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
        return bytes(changed)

    with pytest.raises(HandshakeRefused):
        meet(between=change)


def test_proofs_and_frames_sent_back_or_of_another_session_are_refused():
    agent, driver = AgentHandshake(KEY, LAUNCH, 1), DriverHandshake(KEY, LAUNCH)
    proof = agent.prove(driver.feed(agent.opening))
    with pytest.raises(HandshakeRefused):
        agent.finish(proof)  # reflected
    another = DriverHandshake(KEY, LAUNCH)
    another.feed(agent.opening)
    with pytest.raises(HandshakeRefused):
        another.feed(proof)  # replayed
    first, second = meet(), meet()
    frame = sealed(first[0], [b"run"])
    assert opened(first[0], frame[0]) == [b"run"]
    for key in (first[1], *second):
        assert refused(key, frame, [b"run"])


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\n", b"\0\0\1\0#CHALLENGE#", b"perfsuitf" + bytes(60), b"perfsuite" + bytes(200)]
)
def test_a_stranger_is_refused_before_anything_is_computed(noise):
    driver = DriverHandshake(KEY, LAUNCH)
    with pytest.raises(HandshakeRefused, match="no handshake"):
        driver.feed(noise)
    assert driver.session is None


@given(st.lists(st.binary(max_size=120), max_size=6))
def test_noise_is_refused_or_waited_for(pieces):
    driver = DriverHandshake(KEY, LAUNCH)
    try:
        for piece in pieces:
            driver.feed(piece)
    except HandshakeRefused:
        pass
    assert driver.session is None


def test_versions_are_told_apart_on_both_sides():
    agent = AgentHandshake(KEY, LAUNCH, 1)
    told = "the driver speaks protocol 9, this agent 3; install one perfsuite everywhere"
    with pytest.raises(HandshakeRefused, match=told):
        agent.prove(b"perfsuite" + (9).to_bytes(2, "big") + bytes(32))
    with pytest.raises(HandshakeRefused, match="another program"):
        agent.prove(b"SSH-2.0-x".ljust(agent.answer_bytes, b"\0"))
