"""Every error CoLLM raises on purpose.

CollmError
├── SettingsError       a setting is wrong: the start stops and the variable is named
├── MessageError        something on the wire is not what its kind says
├── BrokerError         the broker cannot be reached within the deadline
│   └── BrokerFault         it refuses, and waiting does not help: a damaged key, a missing right, a wrong script
├── FencedError         another holder has the lease: whatever was asked did not happen
├── ModelError          a model cannot be served, by name and reason
├── AdapterError        an adapter does not fit: shapes, modules, digest, values, size
├── DataError           training data is malformed: line, field, value
└── RequestError        a client's request is refused, with HTTP status, code and parameter
    ├── InvalidRequest      400
    ├── UnknownModel        404
    ├── Conflict            409
    ├── PayloadTooLarge     413
    ├── Overloaded          429, with Retry-After
    ├── Unavailable         503, with Retry-After
    └── InternalError       500
        └── Damaged             500, a key in Redis that somebody must repair or delete
"""

from __future__ import annotations


class CollmError(Exception):
    """Root of the tree."""


class SettingsError(CollmError):
    """Names the environment variable."""


class MessageError(CollmError):
    """Names the kind and the field."""


class BrokerError(CollmError):
    """The broker stayed away longer than the deadline."""


class BrokerFault(BrokerError):
    """Somebody must repair a key, a right or a script; other requests may well go through."""


class FencedError(CollmError):
    """A newer leader exists."""


class ModelError(CollmError):
    """Unsupported or unreadable model."""


class AdapterError(CollmError):
    """Unfit adapter."""


class DataError(CollmError):
    """Malformed training data; `line` is 1-based, 0 when no line applies."""

    def __init__(self, message: str, *, line: int = 0, field: str = "") -> None:
        where = f"line {line}: " if line else ""
        super().__init__(f"{where}{field + ': ' if field else ''}{message}")
        self.line = line
        self.field = field


class RequestError(CollmError):
    """A refusal that reaches the client. `code` is machine-readable; `param` names the offending field."""

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str, *, param: str = "", code: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError):
    """The request can never be served as it is."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class UnknownModel(RequestError):
    """No model or adapter of that name."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class Conflict(RequestError):
    """Not while something else goes on."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class PayloadTooLarge(RequestError):
    """The body is over its limit."""

    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"


class Overloaded(RequestError):
    """The queue is full; retry after `retry_after_s`."""

    status = 429
    type = "rate_limit_error"
    code = "rejected-saturated"


class Unavailable(RequestError):
    """No replica, a deadline that passed in the queue, or a shutdown."""

    status = 503
    type = "server_error"
    code = "unavailable"


class InternalError(RequestError):
    """Our fault."""


class Damaged(InternalError):
    """A key in Redis holds what nobody of CoLLM wrote there; names the key."""

    code = "damaged_key"

    def __init__(self, key: str) -> None:
        super().__init__(f"{key} is damaged; it must be repaired or deleted in the broker")
