"""Members that call different things: an error on every rank that names both sides, never a hang or a wrong sum."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from paceline.collective import Group
from paceline.errors import Mismatch
from paceline.testing.crew import Crew

LAYOUTS = ["aa", "aaaa", "ab", "abcd", "aabb"]


def odd_one_out(group: Group, case: str) -> Any:
    """The last rank does something else than the others."""
    odd = group.rank == group.size - 1
    others = [torch.zeros(4) for _ in range(group.size)]
    calls = {
        "shape": lambda: group.all_reduce(torch.zeros(6) if odd else torch.zeros(2, 3)),
        "size": lambda: group.all_reduce(torch.zeros(500_000 if odd else 10)),
        "dtype": lambda: group.all_reduce(torch.zeros(4, dtype=torch.int32 if odd else torch.float32)),
        "reduction": lambda: group.all_reduce(torch.zeros(4), "max" if odd else "sum"),
        "algorithm": lambda: group.all_reduce(torch.zeros(4), algorithm="ring" if odd else "tree"),
        "operation": lambda: group.barrier() if odd else group.all_reduce(torch.zeros(4)),
        "root": lambda: group.broadcast(torch.zeros(4), 1 if odd else 0),
        "sizes": lambda: group.all_gather([torch.zeros(3 if odd else 4) for _ in others], torch.zeros(3 if odd else 4)),
        "parts": lambda: group.reduce_scatter(
            torch.zeros(3 if odd else 4), [torch.zeros(3 if odd else 4)] * group.size
        ),
        "counts": lambda: group.all_to_all(
            others, [torch.zeros(4 if k == group.rank or not odd else 5) for k in range(group.size)]
        ),
    }
    errors = []
    for _ in range(2):  # who had all it needed before the difference showed gets the error with the next call
        try:
            calls[case]()
        except Mismatch as error:
            errors.append(error)
    return errors


CASES = ["shape", "size", "dtype", "reduction", "algorithm", "operation", "root", "sizes", "parts", "counts"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_every_rank_gets_an_error_that_names_both_sides(case: str, layout: str) -> None:
    with Crew(len(layout), hosts=layout) as crew:
        for errors in crew.run(odd_one_out, case):
            assert errors
            for error in errors:
                ranks = {int(rank) for rank in re.findall(r"\(rank (\d+)\)", str(error))}
                assert len(ranks) == 2
                assert crew.size - 1 in ranks


def wrong_sum_or_error(group: Group) -> Any:
    tensor = torch.ones(1000 + (group.rank == 1))
    try:
        group.all_reduce(tensor)
    except Mismatch:
        return "error"
    return tensor


@pytest.mark.parametrize("layout", ["aaa", "abc", "aab"])
def test_nobody_gets_a_sum_of_tensors_that_do_not_fit(layout: str) -> None:
    with Crew(3, hosts=layout) as crew:
        assert crew.run(wrong_sum_or_error) == ["error"] * 3


def mismatched_message(group: Group) -> Any:
    try:
        if group.rank == 0:
            group.send(torch.zeros(3), 1)
        else:
            group.recv(torch.zeros(4), 0)
        group.barrier()
    except Mismatch as error:
        return str(error)
    return None


@pytest.mark.parametrize("layout", ["aa", "ab"])
def test_a_message_that_does_not_fit_is_an_error_on_both_sides(layout: str) -> None:
    with Crew(2, hosts=layout) as crew:
        for text in crew.run(mismatched_message):
            assert "float32[3]" in text
            assert "float32[4]" in text


def meet(group: Group) -> None:
    group.barrier()


def fail_ahead_of_a_straggler(group: Group) -> Any:
    """Ranks 0 and 1 are through with the broadcast and differ in the next operation; rank 2 still waits for rank 3,
    which will never come to the broadcast, because it learns of the failure first."""
    try:
        group.broadcast(torch.zeros(4), 0)
        group.all_reduce(torch.zeros(4 + group.rank))
    except Mismatch as error:
        return str(error)
    return None


def test_a_failure_that_is_put_off_still_ends_a_wait_that_nobody_will_answer() -> None:
    with Crew(4, hosts="abcd") as crew:
        crew.run(meet)
        crew.start(fail_ahead_of_a_straggler, ranks=[0, 1, 2])
        crew.wait_blocked(0, 1, 2)
        crew.start(fail_ahead_of_a_straggler, ranks=[3])
        texts = crew.finish()
        assert all(text is not None and "rank 0" in text and "rank 1" in text for text in texts)


def fail_and_leave(group: Group) -> Any:
    """The two that differ close the group at once; the third must hear of the difference, not of lost members."""
    tensor = torch.zeros(300_000)
    try:
        group.all_reduce(tensor)
        group.all_reduce(torch.zeros(3 if group.rank == 0 else 4))
        group.all_reduce(tensor)
    except Mismatch as error:
        group.close()
        return str(error)
    return None


@pytest.mark.parametrize("layout", ["aaa", "abc", "aab"])
def test_members_that_leave_after_a_failure_are_not_taken_for_its_cause(layout: str) -> None:
    for _ in range(5):
        with Crew(3, hosts=layout) as crew:
            assert all(text is not None and "rank 0" in text for text in crew.run(fail_and_leave))
