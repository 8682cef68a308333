"""Members that live but cannot reach each other: the second time that two of them fail together, one has to go."""

from __future__ import annotations

from collections import Counter

from paceline.control.machines.roster import MemberRecord


class Conflicts:
    def __init__(self) -> None:
        self._pairs: Counter[frozenset[str]] = Counter()
        self._counted: dict[frozenset[str], int] = {}  # the last switch in which a pair was counted

    def are_repeated_in(self, generation: int, one: str, other: str) -> bool:
        """Two members failed together in this switch, which is counted once; whether not for the first time."""
        pair = frozenset((one, other))
        if self._counted.get(pair) == generation:
            return self._pairs[pair] > 1
        self._counted[pair] = generation
        return self.is_repeated(one, other)

    def is_repeated(self, one: str, other: str) -> bool:
        """Two members failed together; whether not for the first time."""
        pair = frozenset((one, other))
        self._pairs[pair] += 1
        return self._pairs[pair] > 1

    def worst_of(self, holders: list[MemberRecord], generation: int) -> MemberRecord | None:
        """Who of these members to go without, after they broke in this generation or a later one: the one with most
        complaints, of equal ones the later. None while no two have failed together before."""
        living = {record.member: record for record in holders}
        complaints = [
            (record.member, suspect)
            for record in holders
            if record.working.broken >= generation
            for suspect in record.working.suspects
            if suspect in living
        ]
        # Two that complain of each other have failed once, not twice.
        repeated = {pair for pair in set(map(frozenset, complaints)) if self.is_repeated(*pair)}
        accused: Counter[str] = Counter()
        for member, suspect in complaints:
            if frozenset((member, suspect)) in repeated:
                accused[suspect] += 1
                accused[member] += 0
        if not accused:
            return None
        order = list(living)
        worst = max(accused, key=lambda member: (accused[member], order.index(member)))
        for pair in [pair for pair in self._pairs if worst in pair]:
            del self._pairs[pair]
        return living[worst]
