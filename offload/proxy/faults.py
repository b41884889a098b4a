"""What goes wrong between the proxy, its engines and its clients."""

__all__ = ["AnswerError", "ClientError", "EngineError"]


class EngineError(Exception):
    """An engine did not answer, or not as an engine does: another one may.

    Attributes:
        is_dead: nobody listens there.
        is_stale: the connection was of an earlier request, and had ended.
        counts: towards the engine's ejection.
    """

    def __init__(
        self, message: str, *, is_dead: bool = False, is_stale: bool = False, counts: bool = True
    ) -> None:
        super().__init__(message)
        self.is_dead = is_dead
        self.is_stale = is_stale
        self.counts = counts


class AnswerError(EngineError):
    """An engine answered with a status that another one may not give.

    Attributes:
        status, body, content_type: for the client, if no engine does better.
    """

    def __init__(self, status: int, body: bytes, content_type: str) -> None:
        super().__init__(f"status {status}", counts=status >= 500)
        self.status = status
        self.body = body
        self.content_type = content_type


class ClientError(Exception):
    """A request that is refused; ``status`` says how."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
