"""How long an engine waits for what the actors decide. Durations are seconds.

These bounds are for when nobody answers any more, since keeping one costs the whole rank: its memory is fenced. So each
of them outlasts what matching takes at its slowest, which this module adds up in one place.
"""

from kvflow.config import Settings


def answer_bound_s(settings: Settings) -> float:
    """Return how long matching takes at most to end what is to end.

    It takes the binding back and asks a live source again every `quarantine_s`. It takes silence for an answer only
    after `transfer_wait_s` (within which a transfer actor cuts its WRITEs off) and three quarantines; see `limits_of`
    in `actors/matching/actor.py` and `await_quiet` in `actors/matching/decide.py`.
    """
    return settings.transfer_wait_s + 3 * settings.quarantine_s


def hold_bound_s(settings: Settings) -> float:
    """Return how long a finished source may be held: its lease, a transfer begun at its end, and matching's answer."""
    return settings.source_lease_s + settings.transfer_wait_s + answer_bound_s(settings) + _slack_s(settings)


def load_bound_s(settings: Settings) -> float:
    """Return how long a load may take: every phase of its registration to its end, and matching's answer."""
    phases = settings.source_wait_s + settings.compute_wait_s + settings.transfer_wait_s
    return phases + answer_bound_s(settings) + _slack_s(settings)


def _slack_s(settings: Settings) -> float:
    """Leave time for messages on their way and for an actor that is started again."""
    return settings.quarantine_s + settings.card_ttl_s
