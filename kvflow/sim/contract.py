"""The checks that vLLM makes by assertion, as an error that a test can catch."""

from kvflow.errors import KvflowError


class SimContractError(KvflowError):
    """The connector broke a rule that would have stopped a real engine."""
