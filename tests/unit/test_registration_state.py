"""What the front door lets in, and what it refuses with which reason."""

import msgspec
import pytest

from kvflow.actors.registration.state import Accepted, Rejected, check
from kvflow.messages import (
    EngineCard,
    EngineProfile,
    EngineRef,
    KvGeometry,
    KvGroup,
    ModelFingerprint,
    Role,
    TargetRegistered,
    pack_blocks,
)

TARGET = EngineRef(engine_id="d", incarnation="1")


def card(
    rank: int = 0, ranks: int = 1, *, roles: tuple[Role, ...] = ("target",), groups: tuple[KvGroup, ...] = (),
    num_blocks: int = 100,
) -> EngineCard:  # fmt: skip
    geometry = KvGeometry(
        dtype="bfloat16", num_blocks=num_blocks, groups=groups or (KvGroup(block_tokens=16),), views=()
    )
    profile = EngineProfile(
        engine=TARGET, rank=rank, ranks=ranks, tp_rank=rank, tp_size=ranks, pp_rank=0, pp_size=1, roles=roles,
        host="h", model="m", geometry=geometry, fingerprint=ModelFingerprint(fields=()),
    )  # fmt: skip
    return EngineCard(profile=profile, agent="a", nixl_metadata=b"", segments=(), placement="process")


GOOD = TargetRegistered(
    transfer_id="t", attempt=1, target=TARGET, request_id="r", prompt_tokens=64, start=16, end=63, ranks=1,
    prompt_digest=b"0" * 16, first_blocks=(1,), blocks=(pack_blocks([5, 9, 99]),), source_wait_s=1.0,
    compute_wait_s=1.0, transfer_wait_s=1.0,
)  # fmt: skip


def changed(**changes: object) -> TargetRegistered:
    return msgspec.structs.replace(GOOD, **changes)


def test_a_good_registration_is_accepted() -> None:
    assert check(GOOD, [card()]) == Accepted()


def test_an_engine_without_cards_is_unknown() -> None:
    verdict = check(GOOD, [])
    assert isinstance(verdict, Rejected)
    assert verdict.reason == "unknown_engine"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"ranks": 2}, "ranks"),
        ({"start": -1}, "range"),
        ({"start": 40, "end": 20}, "range"),
        ({"end": 65}, "range"),
        ({"prompt_tokens": 1 << 40}, "range"),
        ({"attempt": -1}, "attempt"),
        ({"transfer_id": ""}, "transfer id"),
        ({"request_id": "x" * 1000}, "request id"),
        ({"prompt_digest": b"x" * 1000}, "digest"),
        ({"source_wait_s": 0.0}, "source_wait_s"),
        ({"compute_wait_s": float("nan")}, "compute_wait_s"),
        ({"transfer_wait_s": float("inf")}, "transfer_wait_s"),
        ({"transfer_wait_s": 1e9}, "transfer_wait_s"),
        ({"blocks": ()}, "tables"),
        ({"first_blocks": ()}, "tables"),
        ({"first_blocks": (0,)}, "blocks [0, 3)"),
        ({"blocks": (pack_blocks([5, 9]),)}, "blocks [1, 3)"),
        ({"blocks": (pack_blocks([5, 9, 10, 11]),)}, "blocks [1, 5)"),
        ({"blocks": (b"12345",)}, "u32"),
        ({"blocks": (pack_blocks([5, 9, 100]),)}, "block 100"),
        ({"blocks": (pack_blocks([5, 9, 0xFFFFFFFF]),)}, "block 4294967295"),
        ({"blocks": (pack_blocks([5, 9, 9]),)}, "twice"),
        ({"start": 16, "end": 16}, "blocks"),
    ],
)
def test_i7_what_does_not_fit_the_card_is_refused(changes: dict[str, object], word: str) -> None:
    verdict = check(changed(**changes), [card()])
    assert isinstance(verdict, Rejected)
    assert verdict.reason == "bad_registration"
    assert word in verdict.detail


def test_an_empty_range_needs_no_tables() -> None:
    assert check(changed(start=63, blocks=(), first_blocks=()), [card()]) == Accepted()
    assert check(changed(start=63, blocks=(b"",), first_blocks=(3,)), [card()]) == Accepted()


def test_a_source_only_engine_cannot_register() -> None:
    verdict = check(GOOD, [card(roles=("source",))])
    assert isinstance(verdict, Rejected)
    assert "role" in verdict.detail


def test_i6_every_group_is_checked_by_its_own_block_size() -> None:
    groups = (KvGroup(block_tokens=16), KvGroup(block_tokens=32))
    both = changed(first_blocks=(1, 0), blocks=(pack_blocks([5, 9, 7]), pack_blocks([1, 2])))
    assert check(both, [card(groups=groups)]) == Accepted()
    assert isinstance(check(GOOD, [card(groups=groups)]), Rejected)


def test_a_window_group_may_offer_only_the_last_blocks() -> None:
    groups = (KvGroup(block_tokens=16, kind="window", window_tokens=32),)
    assert check(changed(first_blocks=(2,), blocks=(pack_blocks([5, 9]),)), [card(groups=groups)]) == Accepted()
    assert isinstance(check(changed(first_blocks=(0,)), [card(groups=groups)]), Rejected)
    assert isinstance(check(changed(first_blocks=(2,)), [card(groups=groups)]), Rejected)


def test_ids_must_fit_every_rank() -> None:
    cards = [card(0, 2), card(1, 2, num_blocks=50)]
    verdict = check(changed(ranks=2), cards)
    assert isinstance(verdict, Rejected)
    assert "block 99" in verdict.detail
