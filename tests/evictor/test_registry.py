"""Policies by name."""

import pytest

from evictor import LruPolicy, UnknownPolicyError, available_policies, make_policy, register_policy, registry


@pytest.fixture(autouse=True)
def _registry_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))


def test_names_are_sorted_and_make_fresh_policies() -> None:
    names = available_policies()
    assert names == sorted(names)
    assert "lru" in names
    for name in names:
        assert make_policy(name, 8) is not make_policy(name, 8)
    assert isinstance(make_policy("lru", 8), LruPolicy)


def test_a_new_policy_joins_by_name() -> None:
    before = available_policies()
    register_policy("a-new-one", lambda capacity, clock: LruPolicy())
    assert available_policies() == sorted([*before, "a-new-one"])
    assert isinstance(make_policy("a-new-one", 8), LruPolicy)


def test_a_name_is_taken_once() -> None:
    class Other(LruPolicy[object]):
        pass

    with pytest.raises(ValueError, match="'lru' is already registered"):
        register_policy("lru", lambda capacity, clock: Other())
    assert not isinstance(make_policy("lru", 8), Other)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownPolicyError, match=r"'mru' is unknown; use one of: .*lru"):
        make_policy("mru", 8)
    assert issubclass(UnknownPolicyError, ValueError)
