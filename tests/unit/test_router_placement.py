"""Choosing engines: pure, so every rule can be stated in one line."""

from collections.abc import Callable

import pytest

from kvflow.router.placement import Engine, Fleet


def engine(key: str, roles: str, *, models: str = "m", up: bool = True) -> Engine:
    return Engine(
        key=key, url=f"http://{key}", models=frozenset(models.split()), source="s" in roles, target="t" in roles,
        alone="t" in roles or "a" in roles, up=up,
    )  # fmt: skip


def fleet(
    *engines: Engine,
    in_flight: dict[str, int] | None = None,
    last_chosen: dict[str, int] | None = None,
    compatible: Callable[[Engine, Engine], bool] = lambda _source, _target: True,
) -> Fleet:
    return Fleet(engines=engines, compatible=compatible, in_flight=in_flight or {}, last_chosen=last_chosen or {})


def chosen(among: Fleet, model: str = "m", exclude: tuple[str, ...] = ()) -> tuple[str, str] | None:
    pair = among.pair(model, exclude)
    return (pair.prefill.key, pair.decode.key) if pair else None


def test_a_pair_is_a_source_and_another_target() -> None:
    assert chosen(fleet(engine("p", "s"), engine("d", "t"))) == ("p", "d")
    assert chosen(fleet(engine("p", "s"))) is None
    assert chosen(fleet(engine("d", "t"))) is None
    assert chosen(fleet(engine("b", "st"))) is None
    assert chosen(fleet(engine("a", "st"), engine("b", "st"))) in {("a", "b"), ("b", "a")}


def test_the_least_loaded_win_and_equals_take_turns() -> None:
    engines = (engine("p1", "s"), engine("p2", "s"), engine("d1", "t"), engine("d2", "t"))
    assert chosen(fleet(*engines, in_flight={"p1": 2, "p2": 1, "d1": 1})) == ("p2", "d2")
    assert chosen(fleet(*engines, last_chosen={"p1": 7, "p2": 3, "d1": 1, "d2": 4})) == ("p2", "d1")


def test_models_must_match_and_engines_must_be_up() -> None:
    assert chosen(fleet(engine("p", "s", models="m n"), engine("d", "t", models="n"))) is None
    assert chosen(fleet(engine("p", "s", models="m n"), engine("d", "t", models="n")), "n") == ("p", "d")
    assert chosen(fleet(engine("p", "s", up=False), engine("d", "t"))) is None
    assert chosen(fleet(engine("p", "s"), engine("d", "t")), exclude=("d",)) is None


def test_an_incompatible_pair_is_skipped_even_when_less_loaded() -> None:
    engines = (engine("p1", "s"), engine("p2", "s"), engine("d1", "t"), engine("d2", "t"))

    def fits(source: Engine, target: Engine) -> bool:
        return (source.key, target.key) == ("p2", "d2")

    assert chosen(fleet(*engines, in_flight={"p2": 9, "d2": 9}, compatible=fits)) == ("p2", "d2")
    assert chosen(fleet(*engines[:3], compatible=fits)) is None


@pytest.mark.parametrize(("roles", "expected"), [("t", True), ("a", True), ("s", False), ("st", True)])
def test_who_may_answer_alone(roles: str, expected: bool) -> None:
    assert (fleet(engine("e", roles)).alone("m") is not None) is expected


def test_a_leg_can_be_replaced_beside_the_other_one() -> None:
    prefill, other, decode = engine("p1", "s"), engine("p2", "s"), engine("d", "t")
    among = fleet(prefill, other, decode)
    found = among.prefill_for(decode, "m", {"p1"})
    assert found is other
    assert among.prefill_for(decode, "m", {"p1", "p2"}) is None
    assert among.decode_for(prefill, "m", {"d"}) is None
