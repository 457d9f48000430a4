"""Every message type has a golden file: the bytes that this version writes, and that all later ones must read.

`python tests/unit/test_messages_golden.py` writes the files that are missing. A file that exists is never rewritten:
when a message changes its meaning it gets a new tag, and the old file stays for as long as the old tag is decoded.
"""

from pathlib import Path

import pytest

from kvflow.messages import (
    MESSAGE_TYPES,
    Attached,
    AttachEngine,
    AttachRefused,
    EngineCard,
    EngineEvent,
    EngineProfile,
    EngineRef,
    KvGeometry,
    KvGroup,
    KvSegment,
    KvView,
    Message,
    ModelFingerprint,
    PeerHello,
    RankDelivered,
    SourceClosed,
    SourceOpened,
    SourceProgress,
    SourceReleased,
    TargetCancelled,
    TargetRegistered,
    TransferBound,
    TransferCompleted,
    TransferDelivered,
    TransferErrored,
    TransferEvent,
    TransferFailed,
    TransferQuiesced,
    TransferRevoked,
    TransferStarted,
    decode,
    encode,
    pack_blocks,
)

GOLDEN = Path(__file__).parent.parent / "golden"

SOURCE = EngineRef(engine_id="prefill-0", incarnation="00112233aabbccdd")
TARGET = EngineRef(engine_id="decode-0", incarnation="ffeeddcc99887766")
TRANSFER = "2f1d0c9b8a7e6f5d4c3b2a1908172635"
REQUEST = "cmpl-7"
DIGEST = bytes(range(16))
BLOCKS = (pack_blocks([3, 4, 70_000]), pack_blocks([]))

PROFILE = EngineProfile(
    engine=SOURCE, rank=1, ranks=2, tp_rank=1, tp_size=2, pp_rank=0, pp_size=1, roles=("source", "target"),
    host="node-a", model="Qwen3-32B",
    geometry=KvGeometry(
        dtype="bfloat16", num_blocks=512,
        groups=(KvGroup(block_tokens=16), KvGroup(block_tokens=16, kind="window", window_tokens=1024)),
        views=(
            KvView(
                layer="model.layers.0", part="kv", group=0, segment=0, offset=4096, blocks=512, block_tokens=16,
                heads=4, head_start=4, total_heads=8, row_bytes=512, block_stride=32_768, head_stride=8192,
                token_stride=512,
            ),
            KvView(
                layer="model.layers.1", part="k", group=1, segment=0, offset=1 << 24, blocks=512, block_tokens=16,
                heads=4, head_start=4, total_heads=8, row_bytes=2, block_stride=32_768, head_stride=8192,
                token_stride=2, channels=128, channel_stride=32,
            ),
        ),
    ),
    fingerprint=ModelFingerprint(fields=(("kv_dtype", "bfloat16"), ("revision", "main"))),
    api_url="http://10.0.0.1:8000", software=(("kvflow", "0.1.0"), ("vllm", "0.32.0")),
)  # fmt: skip

SAMPLES: tuple[Message, ...] = (
    EngineCard(
        profile=PROFILE, agent="prefill-0@00112233aabbccdd/1", nixl_metadata=b"\x00nixl\xff",
        segments=(KvSegment(address=0x7F00_0000_0000, length=1 << 30, memory="VRAM", device=1),), placement="engine",
    ),
    SourceOpened(
        transfer_id=TRANSFER, attempt=2, source=SOURCE, request_id=REQUEST, tokens=16_000, ranks=2,
        prompt_digest=DIGEST, expected_targets=3,
    ),
    SourceClosed(
        transfer_id=TRANSFER, attempt=2, source=SOURCE, request_id=REQUEST, reason="preempted", detail="out of blocks"
    ),
    SourceProgress(
        transfer_id=TRANSFER, attempt=2, source=SOURCE, rank=1, tokens_final=8192, first_blocks=(3, 0), blocks=BLOCKS,
        last=True,
    ),
    SourceReleased(transfer_id=TRANSFER, attempt=2, source=SOURCE, request_id=REQUEST, outcome="expired"),
    TargetRegistered(
        transfer_id=TRANSFER, attempt=1, target=TARGET, request_id=REQUEST, prompt_tokens=16_000, start=128, end=15_999,
        ranks=2, prompt_digest=DIGEST, first_blocks=(8, 8), blocks=BLOCKS, source_wait_s=30.0, compute_wait_s=600.0,
        transfer_wait_s=30.0,
    ),
    TargetCancelled(transfer_id=TRANSFER, attempt=1, target=TARGET, request_id=REQUEST, detail="client disconnected"),
    TransferCompleted(
        transfer_id=TRANSFER, binding=7, target=TARGET, target_attempt=1, request_id=REQUEST, rank=1
    ),
    TransferFailed(
        transfer_id=TRANSFER, target=TARGET, target_attempt=1, request_id=REQUEST, reason="source_lost",
        detail="card expired",
    ),
    TransferBound(
        transfer_id=TRANSFER, binding=7, source=SOURCE, source_attempt=2, target=TARGET, target_attempt=1,
        request_id=REQUEST, start=128, end=15_999, first_blocks=(8, 8), blocks=BLOCKS, direction="read",
    ),
    TransferRevoked(transfer_id=TRANSFER, binding=7, source=SOURCE, reason="cancelled"),
    TransferStarted(transfer_id=TRANSFER, binding=7, source=SOURCE, rank=1, target=TARGET, target_rank=1),
    TransferQuiesced(transfer_id=TRANSFER, binding=7, source=SOURCE, rank=1),
    TransferDelivered(
        transfer_id=TRANSFER, binding=7, source=SOURCE, rank=1, bytes_total=1 << 31, bytes_early=1 << 30,
        descriptors=8192, pieces=4, bound_to_first_post_s=0.001, last_progress_to_done_s=0.004, posting_s=0.03,
        planning_s=0.002,
    ),
    TransferErrored(
        transfer_id=TRANSFER, binding=7, source=SOURCE, rank=1, reason="transfer_error",
        detail="NIXL_ERR_REMOTE_DISCONNECT",
    ),
    RankDelivered(
        transfer_id=TRANSFER, binding=7, source=SOURCE, source_attempt=2, source_rank=1, writers=2, target=TARGET,
        target_attempt=1, target_rank=0, request_id=REQUEST,
    ),
    PeerHello(source=SOURCE, rank=1, target=TARGET, target_rank=0, poll_s=1.5),
    TransferEvent(
        kind="delivered", transfer_id=TRANSFER, at=1_760_000_000.25, actor="transfer", binding=7, attempt=2,
        request_id=REQUEST, source=SOURCE, target=TARGET, rank=1, tokens=15_871, tokens_total=16_000,
        bytes_done=1 << 31, bytes_early=1 << 30, descriptors=8192, pieces=4, reason="", detail="",
        bound_to_first_post_s=0.001, last_progress_to_done_s=0.004, posting_s=0.03, planning_s=0.002,
    ),
    EngineEvent(kind="lost", at=1_760_000_000.25, engine=SOURCE, rank=1, roles=("source",), detail="card expired"),
    AttachEngine(profile=PROFILE, segment_lengths=(1 << 30, 4096)),
    Attached(nats_url="nats://kvflow:secret@127.0.0.1:4222", cluster="default"),
    AttachRefused(reason="the segment is shorter than the geometry says", remedy="upgrade the node"),
)  # fmt: skip


def tag_of(message: Message | type[Message]) -> str:
    tag = message.__struct_config__.tag
    assert isinstance(tag, str)
    return tag


def file_of(message: Message | type[Message]) -> Path:
    return GOLDEN / f"{tag_of(message)}.msgpack"


def test_every_message_type_has_a_sample_and_a_tag_with_a_version() -> None:
    assert {type(sample) for sample in SAMPLES} == set(MESSAGE_TYPES)
    tags = [tag_of(kind) for kind in MESSAGE_TYPES]
    assert len(set(tags)) == len(tags)
    assert all(tag.startswith("kvflow.") and tag.rpartition(".v")[2].isdigit() for tag in tags)


def test_no_golden_file_is_left_over() -> None:
    assert {file.name for file in GOLDEN.glob("*.msgpack")} == {file_of(kind).name for kind in MESSAGE_TYPES}


@pytest.mark.parametrize("sample", SAMPLES, ids=tag_of)
def test_samples_encode_to_the_golden_bytes(sample: Message) -> None:
    assert encode(sample) == file_of(sample).read_bytes()


@pytest.mark.parametrize("sample", SAMPLES, ids=tag_of)
def test_golden_bytes_decode_and_encode_again_to_themselves(sample: Message) -> None:
    golden = file_of(sample).read_bytes()
    assert decode(golden) == sample
    assert encode(decode(golden)) == golden


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for made in SAMPLES:
        if not file_of(made).exists():
            file_of(made).write_bytes(encode(made))
