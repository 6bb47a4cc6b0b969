"""What the tensor-parallel ranks of one server decide together.

Every rank has its own peer, its own fetches and its own acknowledgements, but SGLang's scheduler
must do the same in the same step on all of them: which requests end, and which slots and rows are
free for the next ones. A rank that decides alone leaves a collective that the others have entered.

So each rank says what it knows, at places of the scheduler's loop that all ranks pass in the same
order, and all act on what all have said. A list that is reduced is the same on every rank by
construction: a batch, or the releases of requests, which SGLang itself makes in step. With one rank
nothing is said. No thread, no clock; the caller's scheduler thread owns an `Agreement`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Protocol


class Ranks(Protocol):
    """The ranks of a server; each method returns when every rank has called it."""

    @property
    def size(self) -> int:
        """How many there are."""

    def least(self, numbers: list[int]) -> list[int]:
        """The smallest number of all ranks at each place; all give as many."""

    def texts(self, text: str) -> list[str]:
        """The text of every rank, by rank."""


class OneRank:
    """A server of one rank: what it says is what all say."""

    size = 1

    def least(self, numbers: list[int]) -> list[int]:
        """See Ranks."""
        return numbers

    def texts(self, text: str) -> list[str]:
        """See Ranks."""
        return [text]


class _Release:
    """One release of a request: what frees its slots and row, and whether that is safe here."""

    def __init__(self, free: Callable[[], None]) -> None:
        self.free = free
        self.safe = False


class Agreement:
    """Which requests have failed, and which slots are free, on all ranks alike."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        """ranks: of this server; None: there is one."""
        self._ranks = ranks or OneRank()
        self._releases: list[_Release] = []

    @property
    def size(self) -> int:
        """How many ranks agree."""
        return self._ranks.size

    @property
    def held(self) -> int:
        """Releases that are not free yet; the same number on every rank."""
        return len(self._releases)

    def texts(self, text: str) -> list[str]:
        """What every rank has to say, by rank; all ranks call it in the same step."""
        return self._ranks.texts(text)

    # Failures -------------------------------------------------------------------------------

    def failures(self, causes: Sequence[str | None]) -> list[str | None]:
        """Why each request of a batch has failed, on whatever rank; None: on none.

        causes: what this rank knows of each request, in the batch's order. Where several ranks have
        a cause, the lowest rank's counts. Costs one small reduction, and the texts where there is
        a failure.
        """
        if self.size == 1 or not causes:
            return list(causes)
        sound = self._ranks.least([int(cause is None) for cause in causes])
        if all(sound):
            return list(causes)
        agreed: list[str | None] = [None] * len(causes)
        for text in reversed(self._ranks.texts(json.dumps(list(causes)))):
            for place, cause in enumerate(json.loads(text)):
                agreed[place] = cause or agreed[place]
        return agreed

    # Releases -------------------------------------------------------------------------------

    def release(self, free: Callable[[], None]) -> Callable[[], None]:
        """A request is over; call the result once nothing can write to its slots for this rank.

        `free` runs in the first `settle` after that has been called on every rank; with one rank,
        at once. Every rank must make the same releases in the same order.
        """
        release = _Release(free)
        self._releases.append(release)

        def safe() -> None:
            release.safe = True
            if self.size == 1 and release in self._releases:
                self._releases.remove(release)
                release.free()

        return safe

    def settle(self) -> None:
        """Free what is safe on all ranks, in the order of the releases; every rank calls it."""
        if self.size == 1 or not self._releases:
            return
        safe = self._ranks.least([int(release.safe) for release in self._releases])
        releases = list(zip(self._releases, safe, strict=True))
        # First, so that a `free` that raises is not run again.
        self._releases = [release for release, all_safe in releases if not all_safe]
        for release, all_safe in releases:
            if all_safe:
                release.free()
