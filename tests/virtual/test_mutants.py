"""The random workload finds the historic bugs: each mutant of our code is caught within so many steps."""

import random

import pytest

from offload.testing.virtual import RunFailedError, draw_kind, run_seed
from tests.seeds import OTHER_SEEDS
from tests.virtual.mutants import MUTANTS, Mutant

pytestmark = pytest.mark.skipif(OTHER_SEEDS != 0, reason="how soon a mutant is met is up to the seeds")

_SEEDS = 320
_TURNS = 200


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    steps = 0
    for seed in range(_SEEDS):
        if not mutant.may_show(draw_kind(mutant.kind, seed, random.Random(seed))):
            continue
        try:
            steps += run_seed(seed, _TURNS, kind=mutant.kind).steps
        except RunFailedError as failure:
            steps += failure.step
            if isinstance(failure.cause, TypeError):
                pytest.fail(f"{mutant.name} does not fit our code: {failure.cause}")
            cause = str(failure.cause).splitlines()[0]
            print(
                f"{mutant.name}: caught at seed {seed} after {steps} steps: "
                f"{type(failure.cause).__name__}: {cause[:150]}"
            )
            return
    pytest.fail(f"{mutant.name} was not caught in {_SEEDS} seeds, {steps} steps")
