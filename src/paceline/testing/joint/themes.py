"""Which faults a schedule is made of, and how often each of them comes up.

A schedule about everything has all kinds. Those about a part of it let faults meet that do harm only together.
"""

from __future__ import annotations

from typing import NamedTuple


class Theme(NamedTuple):
    """Faults by name, with their weights; they come within a time between these two."""

    faults: dict[str, int]
    lasts_s: tuple[float, float] = (0.8, 3.5)


_WORKERS = {
    "kill_one": 6,
    "kill_two": 2,
    "kill_at_the_end_of_an_operation": 6,
    "kill_all": 1,
    "raise_one": 2,
    "raise_all": 1,
    "stop_one": 3,
    "join": 4,
    "join_two_and_kill_one": 4,
    "leave": 3,
    "drain": 2,
    "call_a_burden": 2,
    "cut_from_coordinator": 2,
    "cut_pair": 2,
    "cut_hosts": 3,
    "blink": 2,
    "crash_coordinator": 3,
    "crash_coordinator_and_kill_one": 2,
    "crash_coordinator_between": 2,
    "stop_coordinator": 3,
    "stop_coordinator_between": 1,
    "stop_coordinator_and_worker": 2,
    "halt": 1,
}
_SERVERS = {
    "kill_server": 6,
    "kill_when_something_moves": 7,
    "kill_server_and_worker": 3,
    "kill_server_that_answers": 3,
    "kill_server_that_shows": 3,
    "evict_server": 5,
    "stop_server": 4,
    "break_connection": 5,
    "join_server": 4,
    "leave_server": 5,
    "change_load": 3,
}
_OF_WORKERS = {
    "deaths": Theme({"kill_at_the_end_of_an_operation": 6, "kill_one": 3, "kill_two": 2, "join": 2}),
    "joins": Theme({"join_two_and_kill_one": 8, "join": 3, "kill_at_the_end_of_an_operation": 3, "leave": 2}),
    "takeovers": Theme({"join_and_lose_the_others": 6, "join": 2, "kill_one": 1, "crash_coordinator": 1}),
    "partitions": Theme({"part_hosts": 3, "cut_hosts": 2, "cut_pair": 2, "join": 2, "kill_one": 1}),
    "journal": Theme(
        {
            "lose_journal": 4,
            "lose_journal_and_kill_one": 4,
            "crash_coordinator": 1,
            "join": 3,
            "kill_one": 2,
            "leave": 1,
        }
    ),
    "pauses": Theme(
        {
            "stop_coordinator": 4,
            "stop_coordinator_between": 2,
            "stop_coordinator_and_worker": 4,
            "stop_one": 2,
            "kill_one": 1,
        }
    ),
    "coordinator": Theme(
        {
            "crash_coordinator": 4,
            "crash_coordinator_between": 4,
            "crash_coordinator_and_kill_one": 3,
            "stop_coordinator": 2,
            "stop_coordinator_and_worker": 3,
            "cut_from_coordinator": 2,
            "kill_at_the_end_of_an_operation": 3,
            "join": 3,
            "blink": 3,
        }
    ),
}
_OF_SERVERS = {
    "evictions": Theme({"evict_server": 6, "break_connection": 3, "stop_server": 1, "join_server": 1}, (2.0, 4.5)),
    "moves": Theme({"kill_when_something_moves": 6, "join_server": 5, "leave_server": 6, "break_connection": 2}),
    "server deaths": Theme(
        {
            "kill_server_that_answers": 6,
            "kill_server_that_shows": 6,
            "kill_server": 4,
            "kill_server_and_worker": 3,
            "break_connection": 2,
        }
    ),
    "restarts": Theme(
        {
            "crash_coordinator": 5,
            "crash_coordinator_and_kill_one": 6,
            "kill_server": 2,
            "join_server": 2,
            "kill_one": 2,
            "change_load": 2,
        }
    ),
    "loads": Theme({"change_load": 5, "join_server": 2, "leave_server": 2, "crash_coordinator": 3, "kill_server": 1}),
}
_OF_STEPS = {
    "commits": Theme({"kill_who_agreed": 8, "kill_server": 3, "kill_at_the_end_of_an_operation": 3, "evict_server": 1})
}

_OF_LEASES = {"losses": Theme({"kill_server_that_took_its_part": 8, "kill_server": 1, "kill_one": 2, "join_server": 1})}


def everything(mode: str) -> Theme:
    if mode == "allreduce":
        return Theme({**_WORKERS, "part_hosts": 1, "lose_journal": 1, "lose_journal_and_kill_one": 1})
    return Theme({**_WORKERS, **_SERVERS, **({"kill_who_agreed": 5} if mode == "sync" else {})})


_OF_BOTH = {
    "journal": Theme(
        {
            **_OF_WORKERS["journal"].faults,
            "kill_server": 3,
            "join_server": 2,
            "leave_server": 2,
            "kill_when_something_moves": 2,
            "break_connection": 1,
        }
    ),
    "partitions": Theme({**_OF_WORKERS["partitions"].faults, "kill_server": 1, "join_server": 1, "leave_server": 1}),
}


def themes_of(mode: str) -> dict[str, Theme]:
    if mode == "allreduce":
        return _OF_WORKERS
    return {**_OF_SERVERS, **_OF_BOTH, **(_OF_STEPS if mode == "sync" else _OF_LEASES)}
