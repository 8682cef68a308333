"""From which checkpoints a run may go on with other settings, and by what orders of samples are told apart."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from paceline.data.order import Orders
from paceline.testing.counting import Counting
from paceline.train.sampling import Sampling, misfit
from paceline.train.saving import Checkpoints
from paceline.train.session import Session

KEPT = Sampling(8, "shuffled by seed 3", 96)
FRESH: list[tuple[int, int, list[int]]] = [(2, 0, [])]
BEGUN: list[tuple[int, int, list[int]]] = [(2, 5, []), (2, 4, [6])]


@pytest.mark.parametrize(
    ("now", "position", "leases", "is_leased", "why"),
    [
        (KEPT, 40, [], False, ""),
        (KEPT._replace(batch=12), 40, [], False, ""),  # samples are counted, not steps
        (KEPT._replace(batch=12), 40, [], True, "in batches of 8, and now there are 12"),
        (KEPT._replace(batch=12), 0, BEGUN, True, "in batches of 8, and now there are 12"),
        (KEPT._replace(batch=12), 0, BEGUN, False, "in batches of 8, and now there are 12"),
        (KEPT, 0, BEGUN, True, ""),
        (Sampling(12, "shuffled by seed 4", 50), 0, FRESH, True, ""),
        (Sampling(12, "shuffled by seed 4", 200), 96, [], False, ""),
        (
            Sampling(8, "shuffled by seed 4", 96),
            40,
            [],
            False,
            "by seed 3, and now they are shuffled by seed 4",
        ),
        (Sampling(8, "in the order of the data", 96), 0, BEGUN, True, "and now they are in the order of the data"),
        (KEPT._replace(length=200), 40, [], False, "of 96 samples, and now the data has 200"),
        (KEPT._replace(length=48), 40, [], False, "of 96 samples, and now the data has 48"),
        (KEPT._replace(length=200), 0, BEGUN, True, "of 96 samples, and now the data has 200"),
    ],
)
def test_in_the_middle_of_an_epoch_the_rest_of_it_must_be_the_same_samples(
    now: Sampling, position: int, leases: Any, is_leased: bool, why: str
) -> None:
    found = misfit(KEPT.to_tree(), now, position=position, leases=leases, is_leased=is_leased)
    assert bool(found) == bool(why)
    assert why in found


def test_orders_are_told_apart() -> None:
    def orders(**settings: Any) -> str:
        return Orders(**{"seed": 3, "length": 50, **settings}).describe()

    def own(seed: int, epoch: int, length: int) -> list[int]:
        return random.Random(f"{seed} {epoch}").sample(range(length), length)

    assert orders() == orders()
    assert orders(order=own) == orders(order=own)
    chance = random.Random(1)
    drawn = [orders(order=lambda *_: chance.sample(range(50), 50)) for _ in range(2)]
    assert len({orders(), orders(seed=4), orders(shuffle=False), orders(order=own), *drawn}) == 6


@pytest.mark.parametrize("changed", [{"seed": 4}, {"shuffle": False}])
def test_a_session_refuses_to_go_on_with_other_samples(tmp_path: Path, changed: dict[str, Any]) -> None:
    case = Counting(length=96, batch=8, seed=3)

    def session(**settings: Any) -> Session:
        model = case.model()
        checkpoints = Checkpoints(folder=tmp_path, every_s=None, every_steps=5, resume=True)
        given: dict[str, Any] = {"seed": case.seed, "checkpoints": checkpoints, "global_batch": case.batch} | settings
        made = Session(model, case.optimizer(model), data=case.data(), **given)
        made.loss_fn = case.loss_fn(model)  # type: ignore[attr-defined]
        return made

    first = session()
    for number, batch in enumerate(next(first.epochs(1))):
        first.step(first.loss_fn, batch)  # type: ignore[attr-defined]
        if number == 6:
            break
    first._parts.saver.publish(5)
    first._run._finish(0.0)
    with pytest.raises(ValueError, match="of operation 5 stands in the middle of an epoch whose samples were shuffled"):
        next(session(**changed).epochs(1))
