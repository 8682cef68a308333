"""Updates that are lost, as events name them and as they are counted from there."""

from __future__ import annotations

from paceline.control.messages.losses import named, num_samples, numbers_in


def test_numbers_are_named_in_spans_and_read_again() -> None:
    numbers = {3, 4, 5, 9, 11, 12}
    text = named(numbers, "a server was lost: 7, 8")
    assert text == "updates 3-5, 9, 11-12: a server was lost: 7, 8"
    assert numbers_in(text) == numbers


def test_where_no_update_is_lost_none_is_named() -> None:
    assert named((), "what optimizers kept is") == "no update, but what optimizers kept is"
    assert numbers_in(named((), "what optimizers kept of 12: it is gone")) == set()


def test_the_last_update_of_an_epoch_has_fewer_samples() -> None:
    assert num_samples({1, 2}, length=20, batch=8) == 16
    assert num_samples({3, 6}, length=20, batch=8) == 8
