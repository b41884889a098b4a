"""Turns, rounds and the rows they come to."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.copy_bandwidth.arena import Arena
from benchmarks.copy_bandwidth.devices import Device
from benchmarks.copy_bandwidth.moves import DIRECTIONS, Moves, Pairs, Pattern, draw
from benchmarks.copy_bandwidth.verify import verify
from benchmarks.copy_bandwidth.ways import OurWay, PeakWay, TorchWay, Way

__all__ = ["Bench", "Row", "Turn"]

Row = dict[str, Any]
"""`shape`, `pieces`, `piece_bytes`, `blocks` (each way), `ids`, `direction`, `way`, `gb_per_s`,
`share_of_peak` (of the sum of both peaks where both directions are at once), `times_vllm` (None if there is
none to compare with), `submit_us_per_block`, `seconds` (of the device's clock, from the first start to the
last end), `host_seconds` (from before the submission until the end is known), `rounds`."""

_SEED = 1


class Turn(NamedTuple):
    """One transfer by one way; seconds as in `Row`, those of the submission on the calling thread."""

    num_bytes: int
    seconds: float
    host_seconds: float
    submit_seconds: float

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.seconds / 1e9


class Bench:
    """Lets ways take turns on one device, and remembers the turns of the peak."""

    def __init__(self, device: Device, peak: PeakWay, rounds: int, torch_pieces: int) -> None:
        """`rounds` that count, after one that does not; beyond `torch_pieces` per transfer torch sits out."""
        self._device = device
        self._peak = peak
        self._rounds = rounds
        self._torch_pieces = torch_pieces
        self._peak_turns: dict[str, list[Turn]] = {}
        self._rng = np.random.default_rng(_SEED)

    def rows(self, arena: Arena, block_counts: Sequence[int]) -> Iterator[Row]:
        """Verify every way, then measure all of them with that many blocks in each direction.

        Raises:
            WrongBytesError: a way does not bring the right bytes.
            RuntimeError: a copy failed.
        """
        with ExitStack() as stack:
            ways: list[Way] = [OurWay(arena, self._device), TorchWay(arena, self._device)]
            if self._device.has_vllm:
                from benchmarks.copy_bandwidth.native import NativeWay

                ways.append(NativeWay(arena, self._device))
            for way in ways:
                stack.enter_context(closing(way))
            verify(arena, self._device, ways, self._rng)
            for num_blocks in block_counts:
                for direction in DIRECTIONS:
                    yield from self._compare(arena, ways, num_blocks, direction)

    def peak_rows(self) -> Iterator[Row]:
        """One row per direction, over all rounds so far."""
        figures = {name: median(turn.gb_per_s for turn in turns) for name, turns in self._peak_turns.items()}
        for direction, turns in self._peak_turns.items():
            share = figures[direction] / sum(figures[name] for name in _one_way(direction))
            yield {
                "shape": "one buffer",
                "pieces": 1,
                "piece_bytes": self._peak.num_bytes,
                "blocks": 1,
                "ids": Pattern.CONTIGUOUS.value,
                "direction": direction,
                "way": self._peak.name,
                **_figures(turns, len(DIRECTIONS[direction]), [share], None),
            }

    def _compare(self, arena: Arena, ways: Sequence[Way], num_blocks: int, direction: str) -> Iterator[Row]:
        num_moved = num_blocks * len(DIRECTIONS[direction])
        if num_moved * arena.shape.num_pieces > self._torch_pieces:
            ways = [way for way in ways if way.name != TorchWay.name]
        self._round(arena, ways, num_blocks, direction)
        rounds = [self._round(arena, ways, num_blocks, direction) for _ in range(self._rounds)]
        turns = {key: [taken[key] for taken in rounds] for key in rounds[0]}
        peaks = {name: turns.pop((of, name)) for of, name in list(turns) if of == self._peak.name}
        for name, taken in peaks.items():
            self._peak_turns.setdefault(name, []).extend(taken)
        singles = [peaks[name] for name in _one_way(direction)]
        peak = [sum(turn.gb_per_s for turn in of_round) for of_round in zip(*singles, strict=True)]
        for (name, pattern), taken in turns.items():
            yield {
                "shape": arena.shape.name,
                "pieces": arena.shape.num_pieces,
                "piece_bytes": arena.shape.piece_bytes,
                "blocks": num_blocks,
                "ids": pattern,
                "direction": direction,
                "way": name,
                **_figures(
                    taken,
                    num_moved,
                    _ratios(taken, peak),
                    turns.get(("vllm", pattern)) if name != "vllm" else None,
                ),
            }

    def _round(
        self, arena: Arena, ways: Sequence[Way], num_blocks: int, direction: str
    ) -> dict[tuple[str, str], Turn]:
        """One turn of each way and pattern, and of the peak in each direction, in an order of chance."""
        directions = DIRECTIONS[direction]
        num_bytes = num_blocks * len(directions) * arena.shape.block_bytes
        todo: dict[tuple[str, str], tuple[Way, Moves, int]] = {}
        for pattern in Pattern:
            moves = draw(self._rng, pattern, directions, num_blocks, arena.num_blocks)
            for way in ways:
                todo[way.name, pattern.value] = (way, moves, num_bytes)
        no_ids = np.empty(0, dtype=np.int64)
        for name in dict.fromkeys([*_one_way(direction), direction]):
            moves = dict.fromkeys(DIRECTIONS[name], Pairs(no_ids, no_ids))
            todo[self._peak.name, name] = (self._peak, moves, len(moves) * self._peak.num_bytes)
        keys = list(todo)
        taken = {keys[number]: self._turn(*todo[keys[number]]) for number in self._rng.permutation(len(keys))}
        return {key: taken[key] for key in keys}

    def _turn(self, way: Way, moves: Moves, num_bytes: int) -> Turn:
        begin = way.prepare(moves)
        self._device.begin_turn()
        started = time.perf_counter()
        begin()
        submitted = time.perf_counter()
        way.wait()
        host_seconds = time.perf_counter() - started
        seconds = self._device.turn_seconds()
        return Turn(
            num_bytes, host_seconds if seconds is None else seconds, host_seconds, submitted - started
        )


def _one_way(direction: str) -> list[str]:
    """The single directions that it consists of."""
    return [name for name, each in DIRECTIONS.items() if len(each) == 1 and each[0] in DIRECTIONS[direction]]


def _figures(
    turns: Sequence[Turn], num_blocks: int, shares: Sequence[float], native: Sequence[Turn] | None
) -> Mapping[str, Any]:
    """Medians; of shares and ratios, those of single rounds."""
    times = _ratios(turns, [turn.gb_per_s for turn in native]) if native else None
    return {
        "gb_per_s": round(median(turn.gb_per_s for turn in turns), 3),
        "share_of_peak": round(median(shares), 4),
        "times_vllm": round(median(times), 4) if times else None,
        "submit_us_per_block": round(median(turn.submit_seconds for turn in turns) / num_blocks * 1e6, 4),
        "seconds": round(median(turn.seconds for turn in turns), 7),
        "host_seconds": round(median(turn.host_seconds for turn in turns), 7),
        "rounds": len(turns),
    }


def _ratios(turns: Sequence[Turn], to: Sequence[float]) -> list[float]:
    return [turn.gb_per_s / other for turn, other in zip(turns, to, strict=True)]
