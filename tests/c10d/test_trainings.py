"""DDP, FSDP2, DTensor, pipelining, checkpoints and subgroups give what they give on Gloo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.testing.crew import Crew
from tests.c10d import trainings, worlds


@pytest.fixture(scope="module")
def pair() -> Iterator[Crew]:
    path = worlds.new_file()
    with Crew(2, form=False) as crew:
        for rank in range(2):
            crew.start(worlds.enter_both, rank, "aa", path, ranks=[rank])
        crew.finish()
        yield crew
        crew.run(worlds.leave_both)


@pytest.mark.parametrize("training", trainings.EVERY, ids=lambda training: training.__name__)
def test_gives_what_it_gives_on_gloo(pair: Crew, training: worlds.Program) -> None:
    pair.run(worlds.compare, training)
