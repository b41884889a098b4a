"""When what the pool has is restored, as a user sets it."""

from enum import StrEnum


class RestoreWhen(StrEnum):
    """Whether what the pool has for a request is brought back to the GPU."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"
