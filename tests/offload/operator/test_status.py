"""What ``kv-offload status`` prints of an engine."""

import pytest

from offload.status_command import _tier


@pytest.mark.parametrize(
    ("about", "text"),
    [
        ({"tier": "disk", "path": "/cache"}, "disk at /cache"),
        ({"tier": "valkey", "url": "host:6379/0"}, "valkey at host:6379/0"),
        ({"tier": "siblings", "path": "/dev/shm/kv"}, "siblings at /dev/shm/kv"),
    ],
)
def test_a_tier_is_named_with_where_it_is(about: dict[str, str], text: str) -> None:
    assert _tier(about) == text
