"""Draw requests for a simulated pair of engines: assorted lengths, shared prefixes, aborts."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec

VOCABULARY = 50_000

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class LoadConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describe a workload. Lengths are tokens, log-uniform between the bounds, so that short prompts are common.

    `prefix_share` of the prompts begin with one of `prefixes` common beginnings; `late_share` reach their target only
    after the source has finished. `aborts` transfers come on top of `transfers`, and are given up early.
    """

    transfers: Count = 200
    aborts: Annotated[int, msgspec.Meta(ge=0)] = 0
    seed: int = 1
    shortest: Count = 16
    longest: Count = 2048
    output_tokens: Count = 4
    prefix_share: Share = 0.3
    prefixes: Count = 4
    prefix_tokens: Count = 192
    late_share: Share = 0.25
    abort_within_s: Annotated[float, msgspec.Meta(gt=0)] = 0.05


@dataclass(frozen=True, slots=True)
class PlannedTransfer:
    """Plan one transfer; `abort_after_s` is None when nobody gives it up."""

    number: int
    prompt: list[int]
    output_tokens: int
    late: bool
    abort_after_s: float | None


def plan_load(config: LoadConfig) -> Iterator[PlannedTransfer]:
    """Yield the transfers of a workload; the same configuration gives the same ones."""
    draw = random.Random(config.seed)  # noqa: S311 - a reproducible workload, not a secret
    total = config.transfers + config.aborts
    aborted = set(draw.sample(range(total), config.aborts))
    prefixes = [draw.choices(range(VOCABULARY), k=config.prefix_tokens) for _ in range(config.prefixes)]
    ratio = config.longest / config.shortest
    for number in range(total):
        length = round(config.shortest * ratio ** draw.random())
        head = draw.choice(prefixes)[: length - 1] if draw.random() < config.prefix_share else []
        yield PlannedTransfer(
            number=number,
            prompt=head + draw.choices(range(VOCABULARY), k=length - len(head)),
            output_tokens=draw.randint(1, config.output_tokens),
            late=draw.random() < config.late_share,
            abort_after_s=draw.uniform(0.0, config.abort_within_s) if number in aborted else None,
        )
