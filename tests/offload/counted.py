"""A mapping that counts what is done with it."""

from collections.abc import Iterator, Mapping
from typing import Any


class Counted(Mapping[str, Any]):
    """Counts how often a key is looked up and how many keys are listed."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content
        self.num_lookups = self.num_listed = 0

    def __getitem__(self, key: str) -> Any:
        self.num_lookups += 1
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        for key in self._content:
            self.num_listed += 1
            yield key

    def __len__(self) -> int:
        return len(self._content)
