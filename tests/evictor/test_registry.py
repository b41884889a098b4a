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
        assert make_policy(name) is not make_policy(name)
    assert isinstance(make_policy("lru"), LruPolicy)


def test_a_new_policy_joins_by_name() -> None:
    before = available_policies()
    register_policy("a-new-one", LruPolicy)
    assert available_policies() == sorted([*before, "a-new-one"])
    assert isinstance(make_policy("a-new-one"), LruPolicy)


def test_a_name_is_taken_once() -> None:
    class Other(LruPolicy[object]):
        pass

    with pytest.raises(ValueError, match="'lru' is already registered"):
        register_policy("lru", Other)
    assert not isinstance(make_policy("lru"), Other)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownPolicyError, match=r"'mru' is unknown; use one of: .*lru"):
        make_policy("mru")
    assert issubclass(UnknownPolicyError, ValueError)
