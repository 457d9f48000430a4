"""What the transfer actors of a source report about a binding, rank by rank."""

from kvflow.actors.matching.decide import Effects, settle
from kvflow.actors.matching.model import Binding, State
from kvflow.actors.matching.table import MAX_TEXT
from kvflow.messages import TransferDelivered, TransferErrored, TransferQuiesced


def transfer_quiesced(state: State, now: float, message: TransferQuiesced, out: Effects) -> None:
    """Note that a rank has no WRITE of the binding in flight, and never will.

    Of a lost source it is not believed: a restarted actor says so of what its predecessor had in flight.
    """
    binding = _binding(state, message)
    if binding is not None and not binding.source.lost and not binding.quiet >> message.rank & 1:
        binding.quiet |= 1 << message.rank
        settle(state, binding.source.transfer, now, out)


def transfer_delivered(state: State, now: float, message: TransferDelivered, out: Effects) -> None:
    """Note that a rank has written its whole share."""
    binding = _binding(state, message)
    if binding is not None and not binding.delivered >> message.rank & 1:
        binding.delivered |= 1 << message.rank
        if binding.is_delivered:
            binding.source.used = True
        settle(state, binding.source.transfer, now, out)


def transfer_errored(state: State, now: float, message: TransferErrored, out: Effects) -> None:
    """Note that a rank could not write its share: the registration is to end, unless the binding was revoked before."""
    binding = _binding(state, message)
    if binding is None or binding.quiet >> message.rank & 1:
        return
    binding.quiet |= 1 << message.rank
    registration = binding.registration
    if binding.revoked is None and registration.verdict is None:
        registration.verdict = message.reason
        registration.detail = f"source rank {message.rank}: {message.detail}"[:MAX_TEXT]
    settle(state, binding.source.transfer, now, out)


def _binding(state: State, message: TransferQuiesced | TransferDelivered | TransferErrored) -> Binding | None:
    transfer = state.transfers.get(message.transfer_id)
    if transfer is None:
        return None
    binding = transfer.bindings.get(message.binding)
    if binding is None or binding.source.engine != message.source:
        return None
    if message.rank < 0 or not binding.all_ranks >> message.rank & 1:
        return None
    return binding
