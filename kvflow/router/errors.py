"""Errors as OpenAI's API words them, so that clients' libraries understand every answer of the router."""

import msgspec

from kvflow.errors import KvflowError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    502: "upstream_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(KvflowError):
    """Answer the client with an error status instead of a completion."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, remedy: str = ""
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> bytes:
        """Return the JSON body of the answer."""
        return error_body(self.status, str(self), code=self.code, param=self.param)


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """Encode one error in OpenAI's shape; the type follows from the status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "internal_server_error")
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "param": param, "code": code or str(status)}}
    )


def error_event(status: int, message: str) -> bytes:
    """Encode an error as a server-sent event, for an answer whose status line has already gone out."""
    return b"data: " + error_body(status, message) + b"\n\n"
