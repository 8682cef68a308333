"""Every operation gives what Gloo gives, on one host and on two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.testing.crew import Crew
from tests.c10d import programs, worlds


@pytest.fixture(scope="module", params=["aa", "aab"])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    layout, path = request.param, worlds.new_file()
    with Crew(len(layout), form=False) as crew:
        for rank in range(len(layout)):
            crew.start(worlds.enter_both, rank, layout, path, ranks=[rank])
        crew.finish()
        yield crew
        crew.run(worlds.leave_both)


@pytest.mark.parametrize("program", programs.EVERY, ids=lambda program: program.__name__)
def test_gives_what_gloo_gives(crew: Crew, program: worlds.Program) -> None:
    crew.run(worlds.compare, program)


@pytest.mark.parametrize("program", programs.BEYOND_GLOO, ids=lambda program: program.__name__)
def test_does_what_gloo_does_not(crew: Crew, program: worlds.Program) -> None:
    crew.run(worlds.on_paceline, program)
