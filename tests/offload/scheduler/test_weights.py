"""Names of weights: what is no name is refused where it comes from, not where the engine takes it up."""

import pytest

from offload.errors import OperatorError
from offload.scheduler.weights import MOST_CHARACTERS, Weights, suffix_of


@pytest.mark.parametrize("version", ["", "x" * (MOST_CHARACTERS + 1), "\udcff", 7, None, ["a"]])
def test_what_is_no_name_is_refused(version: object) -> None:
    """One with a lone surrogate comes from an argument that is no UTF-8, and as JSON from anybody."""
    weights = Weights()
    weights.reset(0)
    with pytest.raises(OperatorError, match="name of weights"):
        weights.name(version)  # type: ignore[arg-type]
    assert weights.take(is_last=False) is None
    weights.check_invariants()


@pytest.mark.parametrize("version", ["step 7", "x" * MOST_CHARACTERS, "重み\0"])
def test_what_can_be_written_is_a_name(version: str) -> None:
    weights = Weights()
    weights.reset(0)
    assert weights.name(version) == 1
    assert weights.take(is_last=True) == suffix_of(version)
    assert weights.take(is_last=True) is None
