"""Real processes of unequal speed: what each takes of a batch, what that changes in the training, and what not."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.control.machines.coordinator_events import RunSettings
from paceline.testing.rehearsal import Died, Rehearsal
from tests.train.trainers import check_samples
from tests.train.unequal_trainers import BATCH, by_worker, normalised, num_steps, slow_for_a_while, train_unequal

pytestmark = pytest.mark.timeout(120)

EQUAL = partial(by_worker, (1.0,) * 4)


def shares_of(results: list[dict[str, Any]], step: int) -> list[int]:
    """By worker, in a step."""
    return [next(len(numbers) for _, at, numbers in result["committed"] if at == step) for result in results]


def check_same_training(results: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """All have the same bits, each sample was taken once, and one process alone comes to the same, to rounding."""
    assert len({result["digest"] for result in results}) == 1
    assert results[0]["steps"] == alone["steps"]
    assert results[0]["weights"] == pytest.approx(alone["weights"], rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with Rehearsal(train_unequal, EQUAL, 4, workers=1, folder=tmp_path_factory.mktemp("alone")) as run:
        (result,) = run.finish()
        return dict(result)


def test_each_takes_what_it_can_and_the_training_is_the_same(tmp_path: Path, alone: dict[str, Any]) -> None:
    slowness = partial(by_worker, (1.0, 2.0, 4.0))
    with Rehearsal(train_unequal, slowness, 4, workers=3, folder=tmp_path) as run:
        results = run.finish()
        said = run.events("shares")
    check_samples(results, 4)
    check_same_training(results, alone)
    last_full = num_steps(4) - 1
    shares = shares_of(results, last_full)
    assert sum(shares) == BATCH
    # 40 samples at 1 : 1/2 : 1/4 are 23 : 11 : 6, or others that take as long.
    assert max(share * factor for share, factor in zip(shares, (1, 2, 4), strict=True)) == 24
    assert re.search(r" takes [\d.]+ m?s for 1[34] samples, \w+ [\d.]+ m?s for 1[34] samples$", said[0])
    assert len(said) <= 6


def test_a_worker_that_slows_down_is_relieved_within_five_steps(tmp_path: Path) -> None:
    with Rehearsal(train_unequal, slow_for_a_while, 8, workers=2, folder=tmp_path) as run:
        results = run.finish()
    assert shares_of(results, 29) == [20, 20]
    # The fifth slow step is number 35.
    relieved = min(step for step in range(31, num_steps(8)) if step % 6 and shares_of(results, step)[1] <= 10)
    assert relieved <= 36


def test_fixed_shares_repeat_bit_for_bit(tmp_path: Path) -> None:
    digests = []
    for attempt, slowness in enumerate([EQUAL, partial(by_worker, (3.0, 1.0, 2.0))]):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        settings = RunSettings(wanted=3, fewest=3, most=3, shares=(4, 2, 1))
        with Rehearsal(train_unequal, slowness, 2, workers=3, folder=folder, settings=settings) as run:
            results = run.finish()
            assert run.events("shares") == []
        check_samples(results, 2)
        assert {tuple(sorted(shares_of(results, step))) for step in range(1, 5)} == {(6, 11, 23)}
        digests.append(results[0]["digest"])
    assert digests[0] == digests[1]


def test_with_fixed_shares_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    settings = RunSettings(wanted=3, fewest=3, most=3, shares=(4, 2, 1))
    digests = []
    for name, halts in (("straight", False), ("halted", True)):
        folder = tmp_path / name
        folder.mkdir()
        with Rehearsal(train_unequal, EQUAL, 3, workers=3, folder=folder, settings=settings) as run:
            if halts:
                run.wait_for(lambda: len(run.said(0)) >= 4)
                run.ask("halt", "to go on later")
                assert run.finish() == [Died(0)] * 3, run.log(0)
                assert len(run.said(0)) < num_steps(3)
                run.wait_for(lambda: run.coordinator.poll() is not None)
            else:
                digests += [result["digest"] for result in run.finish()]
    with Rehearsal(train_unequal, EQUAL, 3, workers=3, folder=tmp_path / "halted", settings=settings) as run:
        results = run.finish()
    assert results[0]["committed"][0][1] > 1, "it began anew"
    digests += [result["digest"] for result in results]
    assert len(digests) == 6
    assert len(set(digests)) == 1


def test_equal_shares_on_request(tmp_path: Path) -> None:
    settings = RunSettings(wanted=2, shares=(1,))
    with Rehearsal(
        train_unequal, partial(by_worker, (1.0, 5.0)), 2, workers=2, folder=tmp_path, settings=settings
    ) as run:
        results = run.finish()
    assert {tuple(shares_of(results, step)) for step in (1, 2, 3, 10)} == {(20, 20)}


def test_a_worker_without_enough_memory_takes_less_and_the_step_is_served(
    tmp_path: Path, alone: dict[str, Any]
) -> None:
    function = partial(train_unequal, fits=(8,))
    with Rehearsal(function, EQUAL, 4, workers=4, folder=tmp_path) as run:
        results = run.finish()
        assert all(not isinstance(result, Died) for result in results), run.log(0)
        warnings, said = run.events("warning"), run.events("shares")
    assert warnings == ["out of memory with 10 samples; goes on with 5 at a time"]
    assert "has memory for 5 samples at a time" in said[0]
    check_samples(results, 4)
    check_same_training(results, alone)
    assert shares_of(results, 1) == [10, 10, 10, 10]
    assert shares_of(results, 2)[0] == 5
    assert sorted(shares_of(results, 2)) == [5, 11, 12, 12]


def test_where_no_memory_suffices_the_step_is_done_in_pieces(tmp_path: Path, alone: dict[str, Any]) -> None:
    function = partial(train_unequal, fits=(7, 7))
    with Rehearsal(function, EQUAL, 4, workers=2, folder=tmp_path) as run:
        results = run.finish()
        assert sorted(run.events("warning")) == ["out of memory with 20 samples; goes on with 5 at a time"] * 2
    check_samples(results, 4)
    check_same_training(results, alone)


def test_a_straggler_is_let_go_if_asked_for_and_named_in_any_case(tmp_path: Path, alone: dict[str, Any]) -> None:
    slowness = partial(by_worker, (1.0, 1.0, 70.0))
    for is_dropped in (False, True):
        folder = tmp_path / str(is_dropped)
        folder.mkdir()
        settings = RunSettings(wanted=3, drop_stragglers=is_dropped)
        with Rehearsal(train_unequal, slowness, 4, workers=3, folder=folder, settings=settings) as run:
            results = run.finish()
            warnings, drained = run.events("warning"), run.events("draining")
        assert re.search(r"costs more than it gives: it takes [789]\d ms for 1 of 40 samples", warnings[0])
        assert warnings[0].split()[0] not in warnings[0].split(":", 1)[1]
        assert len(drained) == is_dropped
        assert (results[2] == Died(0)) == is_dropped
        check_samples([result for result in results if result != Died(0)], 4, lost=is_dropped)
        check_same_training(results[:2], alone)


def test_the_first_share_of_a_newcomer_goes_by_its_declared_capacity(tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    function = partial(train_unequal, enough=str(enough), is_timed=True)
    with Rehearsal(function, EQUAL, workers=2, folder=tmp_path) as run:
        run.wait_for(lambda: len(run.said(0)) > 12)
        run.ticket = msgspec.structs.replace(run.ticket, capacity=2.0)
        run.add()
        # How soon its real speed is known depends on how much the machine has to do beside; that it is found does not.
        run.wait_for(lambda: any(samples < 18 for step, samples, _ in run.said(2) if step % 6))
        enough.touch()
        results = run.finish()
    first = next(len(numbers) for _, step, numbers in results[2]["committed"] if step % 6)
    assert 17 <= first <= 23


def test_equal_workers_are_left_alone(tmp_path: Path) -> None:
    with Rehearsal(train_unequal, EQUAL, 8, workers=2, folder=tmp_path) as run:
        results = run.finish()
        assert run.events("shares") == []
    assert shares_of(results, num_steps(8) - 1) == [BATCH // 2] * 2


def test_where_a_model_has_batch_statistics_a_slow_worker_keeps_enough_samples_for_them(tmp_path: Path) -> None:
    """Else it would get 2 of the 40, and its gradients would be those of noise."""
    slowness = partial(by_worker, (1.0, 30.0))
    with Rehearsal(partial(train_unequal, make=normalised), slowness, 4, workers=2, folder=tmp_path) as run:
        results = run.finish()
        assert run.events("shares")
    check_samples(results, 4)
    full = [step for step in range(1, num_steps(4)) if step % 6]
    assert {sum(shares_of(results, step)) for step in full} == {BATCH}
    assert shares_of(results, full[-1]) == [BATCH - 4, 4]


def test_who_waits_for_the_statistics_of_a_slow_worker_is_not_slow_itself(tmp_path: Path) -> None:
    """With batch_norm="sync" the fast worker spends as much time in its forward pass, but waiting. If that counted,
    both would seem to be equally fast, and would keep 20 samples each."""
    enough = tmp_path / "enough"
    function = partial(train_unequal, make=normalised, batch_norm="sync", enough=str(enough), is_timed=True)
    with Rehearsal(function, partial(by_worker, (1.0, 6.0)), workers=2, folder=tmp_path) as run:
        run.wait_for(lambda: any(samples <= 12 for step, samples, _ in run.said(1) if step % 6))
        enough.touch()
        results = run.finish()
    assert {result["steps"] for result in results} == {results[0]["steps"]}
