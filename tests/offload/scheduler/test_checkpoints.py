"""Where a step can leave checkpoints."""

from offload.scheduler.checkpoints import Candidate, candidates


def depths(
    tokens: range, *, handed_over: set[int] | None = None, **more: int | bool
) -> list[tuple[int, bool]]:
    settings = {"num_prompt": 100, "branch": 0, "position_tokens": 8, "is_chunk_end": True} | more
    found = candidates(tokens, handed_over=handed_over, **settings)  # type: ignore[arg-type]
    return [(each.depth, each.is_inner) for each in found]


class TestWindows:
    """They are there at any depth."""

    def test_the_end_of_a_prompt_leaves_a_token(self) -> None:
        assert depths(range(40, 104), num_prompt=104) == [(12, False), (13, True)]
        assert depths(range(40, 104), num_prompt=103) == [(12, False), (13, True)]
        assert depths(range(40, 97), num_prompt=97, is_chunk_end=False) == [(12, False)]

    def test_a_branch_in_the_step(self) -> None:
        assert depths(range(40, 72), branch=56) == [(7, False), (9, True)]
        assert depths(range(40, 72), branch=80) == [(9, True)]

    def test_the_end_of_a_chunk_within_a_position(self) -> None:
        assert depths(range(30)) == [(3, True)]
        assert depths(range(30), is_chunk_end=False) == []

    def test_a_depth_that_the_step_starts_from_still_counts(self) -> None:
        assert depths(range(56, 60), branch=56, is_chunk_end=False) == [(7, False)]
        assert depths(range(57, 60), branch=56, is_chunk_end=False) == []

    def test_nothing_is_no_depth(self) -> None:
        assert depths(range(7)) == []

    def test_no_more_than_a_client_wants(self) -> None:
        assert depths(range(40, 104), cap=7, most=7) == [(7, False)]
        assert depths(range(40, 104), cap=7, most=7, branch=48) == [(6, False), (7, False)]
        assert depths(range(64, 104), cap=7, most=7) == []


class TestDrafts:
    """vLLM goes on a position earlier, for the layers that draft, and hands states over there."""

    def test_the_end_of_a_prompt(self) -> None:
        assert depths(range(70, 98), handed_over={88}, num_prompt=98, num_volatile=1) == [(11, False)]

    def test_the_end_of_a_prompt_of_whole_positions(self) -> None:
        """What it leaves for the same prompt, and for longer ones."""
        ends = depths(range(70, 104), handed_over={88, 96}, num_prompt=104, num_volatile=1)
        assert ends == [(11, False), (12, False), (13, True)]

    def test_a_short_prompt_has_none(self) -> None:
        assert depths(range(9), handed_over=set(), num_prompt=9, num_volatile=1, is_chunk_end=False) == []


class TestStates:
    """They are there where a step begins or ends, or where the engine hands them over."""

    def test_within_a_step_there_is_none(self) -> None:
        assert depths(range(40, 72), handed_over=set(), branch=56) == [(5, True), (9, True)]
        assert depths(range(41, 71), handed_over=set(), branch=56) == []

    def test_what_is_handed_over(self) -> None:
        assert depths(range(41, 71), handed_over={56, 64}, branch=56) == [(7, False), (8, True)]

    def test_where_it_stands(self) -> None:
        tokens = range(40, 72)
        found = candidates(tokens, 100, 0, 8, handed_over={56}, is_chunk_end=True)
        assert list(found) == [Candidate(5, True, True), Candidate(7, True, False), Candidate(9, True, True)]
