"""Decoding gives a message or a WireError and nothing else; subjects are built and parsed without loss."""

import zlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_messages_golden import PROFILE, SAMPLES, SOURCE

from kvflow.bus.memory import subject_matches
from kvflow.errors import WireError
from kvflow.messages import (
    EngineCard,
    EngineRef,
    Message,
    SourceProgress,
    Subjects,
    TransferRevoked,
    decode,
    encode,
    pack_blocks,
    shard_of,
    unpack_blocks,
)
from kvflow.messages.codec import MAX_MESSAGE_BYTES
from kvflow.messages.subjects import decode_token, encode_token, parse_card_key, parse_event

ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
refs = st.builds(EngineRef, engine_id=ids, incarnation=ids)
numbers = st.integers(-(1 << 63), (1 << 64) - 1) | st.floats()
plain = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


def message_or_wire_error(data: bytes) -> None:
    try:
        message = decode(data)
    except WireError:
        return
    assert isinstance(message, Message)
    assert encode(decode(encode(message))) == encode(message)


@given(st.binary(max_size=200))
def test_i7_random_bytes_give_a_message_or_a_wire_error(data: bytes) -> None:
    message_or_wire_error(data)


@given(plain)
def test_i7_any_msgpack_value_gives_a_message_or_a_wire_error(value: object) -> None:
    message_or_wire_error(msgspec.msgpack.encode(value))


@given(st.sampled_from(SAMPLES), st.data())
@settings(max_examples=400)
def test_i7_mutilated_messages_give_a_message_or_a_wire_error(sample: Message, data: st.DataObject) -> None:
    raw = bytearray(encode(sample))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        if kind == "flip":
            raw[at] = data.draw(st.integers(0, 255))
        elif kind == "cut" and len(raw) > 1:
            del raw[at : at + data.draw(st.integers(1, 8))]
            raw = raw or bytearray(b"\x80")
        else:
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=8))
    message_or_wire_error(bytes(raw))


@given(st.sampled_from(SAMPLES), st.data())
@settings(max_examples=300)
def test_i7_fields_of_any_type_give_a_message_or_a_wire_error(sample: Message, data: st.DataObject) -> None:
    fields = msgspec.msgpack.decode(encode(sample))
    name = data.draw(st.sampled_from(sorted(fields)))
    if data.draw(st.booleans()):
        fields[name] = data.draw(plain)
    else:
        del fields[name]
    message_or_wire_error(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\x91" * 100_000,
        b"\x81\xa4type" * 50_000,
        bytes(MAX_MESSAGE_BYTES + 1),
        encode(SAMPLES[0]) + b"\x00",
        encode(SAMPLES[0])[:-1],
        msgspec.msgpack.encode({"type": "kvflow.unknown.v1"}),
        msgspec.msgpack.encode({"type": 5}),
        msgspec.msgpack.encode({"type": "kvflow.source_released.v1"}),
    ],
    ids=[
        "empty",
        "reserved",
        "no fields",
        "deep list",
        "deep map",
        "too long",
        "trailing",
        "cut",
        "unknown",
        "tag",
        "bare",
    ],
)
def test_i7_what_is_no_message_is_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


def test_fields_that_a_later_version_adds_are_ignored() -> None:
    message = TransferRevoked(transfer_id="t", binding=1, source=SOURCE, reason="cancelled")
    fields = msgspec.msgpack.decode(encode(message))
    fields["added_later"] = [1, 2, {"x": 3}]
    assert decode(msgspec.msgpack.encode(fields)) == message


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        SAMPLES[0].agent = "other"  # type: ignore[attr-defined]


def test_a_card_names_its_engine_and_rank() -> None:
    card = EngineCard(profile=PROFILE, agent="a", nixl_metadata=b"", segments=(), placement="process")
    assert (card.engine, card.rank) == (SOURCE, 1)


def test_the_longest_block_table_fits_into_a_message() -> None:
    table = pack_blocks(list(range(128 * 1024 // 16)))
    message = SourceProgress(
        transfer_id="t", attempt=1, source=SOURCE, rank=0, tokens_final=128 * 1024, first_blocks=(0,) * 6,
        blocks=(table,) * 6,
    )  # fmt: skip
    assert len(encode(message)) < MAX_MESSAGE_BYTES / 4
    assert decode(encode(message)) == message


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=50))
def test_block_tables_round_trip(blocks: list[int]) -> None:
    packed = pack_blocks(blocks)
    assert len(packed) == 4 * len(blocks)
    assert unpack_blocks(packed).tolist() == blocks


@given(st.binary(max_size=40).filter(lambda data: len(data) % 4 != 0))
def test_i7_a_torn_block_table_is_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        unpack_blocks(data)


@given(ids)
def test_tokens_round_trip_and_are_one_token(value: str) -> None:
    token = encode_token(value)
    assert token.isascii()
    assert not set(token) & set(". *>\t\r\n\0")
    assert decode_token(token) == value


@given(ids, ids)
def test_different_ids_have_different_tokens(one: str, other: str) -> None:
    assert (encode_token(one) == encode_token(other)) == (one == other)


@given(st.text(max_size=20))
def test_i7_decoding_a_token_gives_its_only_origin_or_a_wire_error(token: str) -> None:
    try:
        value = decode_token(token)
    except WireError:
        return
    assert encode_token(value) == token


@pytest.mark.parametrize("value", ["", "\ud800", "a\udfff"])
def test_what_has_no_token_is_a_wire_error(value: str) -> None:
    with pytest.raises(WireError):
        encode_token(value)


@given(ids, refs, st.integers(0, 65_535))
def test_card_keys_round_trip(cluster: str, engine: EngineRef, rank: int) -> None:
    key = Subjects(cluster).card_key(engine, rank)
    assert parse_card_key(key) == (engine, rank)
    assert set(key) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=./")


@given(st.text(max_size=30) | st.from_regex(r"[a-z=.0-9]{0,12}\.[0-9²٣]{1,5}", fullmatch=True))
def test_i7_parsing_a_card_key_gives_its_only_origin_or_a_wire_error(key: str) -> None:
    try:
        engine, rank = parse_card_key(key)
    except WireError:
        return
    assert Subjects("c").card_key(engine, rank) == key


@given(ids, ids, ids)
def test_events_round_trip(cluster: str, kind: str, key: str) -> None:
    subjects = Subjects(cluster)
    assert parse_event(subjects.event(kind, key)) == (kind, key)
    assert subject_matches(subjects.events_all(), subjects.event(kind, key))


@given(st.text(max_size=40))
def test_i7_parsing_an_event_subject_gives_a_result_or_a_wire_error(subject: str) -> None:
    with pytest.raises(WireError):
        parse_event(subject)


@given(ids, refs, st.integers(0, 7), st.integers(0, 1023))
def test_subscriptions_cover_what_is_published_and_nothing_else(
    cluster: str, engine: EngineRef, rank: int, shard: int
) -> None:
    subjects = Subjects(cluster)
    control = subjects.control(shard, "source", engine)
    assert subject_matches(subjects.control_shard(shard), control)
    assert subject_matches(subjects.control_all(), control)
    assert subject_matches(subjects.control_source(engine), control)
    assert not subject_matches(subjects.control_shard(shard + 1), control)
    assert not subject_matches(subjects.control_source(engine), subjects.control(shard, "report", engine))
    published = [
        subjects.registration(), control, subjects.transfer(engine, rank), subjects.transfer(engine),
        subjects.completion(engine, rank), subjects.completion(engine), subjects.engine(engine, rank),
        subjects.engine(engine), subjects.event("bound", "t"),
    ]  # fmt: skip
    assert len(set(published)) == len(published)
    assert all(subject.startswith(subjects.root + ".") and all(subject.split(".")) for subject in published)
    assert not any(subject_matches(subjects.control_all(), subject) for subject in published if subject != control)


@given(ids, ids)
def test_clusters_have_streams_and_buckets_of_their_own(one: str, other: str) -> None:
    for name in ("control", "events"):
        assert (Subjects(one).stream(name) == Subjects(other).stream(name)) == (one == other)
    bucket = Subjects(one).bucket("engines")
    assert set(bucket) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


def test_near_equal_clusters_have_different_buckets() -> None:
    names = ["a.", "a-x2E", "a--x2E", "a-x-2E", "a=2E"]
    assert len({Subjects(name).bucket("b") for name in names}) == len(names)


@given(ids, st.integers(1, 1024))
def test_every_transfer_has_one_shard(transfer_id: str, shards: int) -> None:
    assert shard_of(transfer_id, shards) == zlib.crc32(transfer_id.encode()) % shards
