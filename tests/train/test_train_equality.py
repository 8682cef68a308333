"""Workers die and join, and what is learned by all-reduce is what one process learns, to rounding."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from paceline.data.order import Orders
from paceline.testing.rehearsal import Rehearsal
from tests.train.trainers import BATCH, LENGTH, SEED, Numbered, check_alike, check_samples, make_model, train

STEPS = -(-LENGTH // BATCH)


def seeded_model() -> nn.Module:
    torch.manual_seed(11)
    return make_model()


def alone(epochs: int) -> tuple[list[float], list[float]]:
    """Losses and weights of a bare loop over the same global batches: no session, no strategy."""
    model, data = seeded_model(), Numbered()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
    orders = Orders(seed=SEED, length=LENGTH, shuffle=True, order=None)
    losses = []
    for epoch in range(epochs):
        for start in range(0, LENGTH, BATCH):
            chosen = [int(number) for number in orders.slice(epoch, start, min(start + BATCH, LENGTH))]
            x = torch.stack([data[number][0] for number in chosen])
            y = torch.stack([data[number][1] for number in chosen])
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    return losses, torch.cat([tensor.flatten() for tensor in model.state_dict().values()]).tolist()


def test_all_reduce_through_kills_and_joins_learns_what_one_process_learns(tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    function = partial(train, make=seeded_model)
    with Rehearsal(function, 0, 0.01, str(enough), workers=3, folder=tmp_path) as run:
        living = [0, 1, 2]
        for round_, victim in enumerate((1, 0, 2)):
            run.wait_for(lambda: all(len(run.said(number)) > 3 for number in living))
            run.kill(victim)
            living.remove(victim)
            if round_ < 2:
                run.add()
                living.append(len(run.workers) - 1)
        enough.touch()
        results = run.finish(living)
        assert not run.events("lost"), "the state was lost: what follows would compare a rollback"
    check_alike(results)
    epochs = results[0]["steps"] // STEPS
    check_samples(results, epochs, lost=True)
    losses, weights = alone(epochs)
    length = len(weights)
    for result in results:
        found = result["weights"]  # with the tally, which the bare loop does not have
        both = [found[:length], found[len(found) - length :]]
        assert any(torch.allclose(torch.tensor(one), torch.tensor(weights), rtol=1e-3, atol=1e-4) for one in both)
        for step, loss in result["losses"].items():
            assert abs(loss - losses[step - 1]) < 1e-3 * max(1.0, abs(losses[step - 1])), f"step {step}"
