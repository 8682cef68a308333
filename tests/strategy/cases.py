"""Small trainings that the strategy's tests run in one process by hand, and in several by the strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import nn

from paceline.collective import Group
from paceline.strategy import Agreement, Notice, Updater
from paceline.strategy.options import SessionOptions

TOTAL = 12
SEED = 5
MARK = 100.0


class Case(NamedTuple):
    modules: Any
    optimizers: list[torch.optim.Optimizer]
    loss_fn: Callable[..., Any]
    extra: tuple[torch.Tensor, ...] = ()


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(TOTAL, 6, generator=generator)
    return x, torch.randint(3, (TOTAL,), generator=generator)


# -- cases: built with the same seed on every worker -------------------------------------------------------------------


def mlp() -> Case:
    model = nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 70), nn.Tanh(), nn.Linear(70, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Case(model, [optimizer], lambda x, y: functional.cross_entropy(model(x), y))


def tied_and_frozen() -> Case:
    """One matrix under two names, a frozen layer, a parameter in no optimizer, one that only an optimizer knows."""
    first, second, head = nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 3)
    second.weight = first.weight
    head.bias.requires_grad_(False)
    scale = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([first.weight, head.weight, scale], lr=0.1, momentum=0.9)

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(head(second(torch.tanh(first(x)))) * scale, y)

    return Case(nn.ModuleList([first, second, head]), [optimizer], loss_fn, (scale,))


def several_types() -> Case:
    """Parameters of two types, two modules, two optimizers with two groups."""
    first, second = nn.Linear(6, 8), nn.Linear(8, 3).double()
    groups: list[dict[str, Any]] = [{"params": [first.weight]}, {"params": [second.weight], "lr": 0.05}]
    optimizers = [torch.optim.SGD(groups, lr=0.1), torch.optim.Adam([first.bias, second.bias], lr=0.02)]
    return Case(
        {"first": first, "second": second},
        optimizers,
        lambda x, y: functional.cross_entropy(second(torch.tanh(first(x)).double()), y),
    )


def weighted() -> Case:
    """A mean over some of the samples; a share may have none of them."""
    model = nn.Linear(6, 3)

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        counted = x[:, 0] > 0
        return functional.cross_entropy(model(x)[counted], y[counted]), counted.sum()

    return Case(model, [torch.optim.SGD(model.parameters(), lr=0.1)], loss_fn)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)


def branches() -> Case:
    """A layer that only a share with the first sample uses, and one that nobody uses."""
    model = Branches()

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model.always(x)
        marked = x[:, :1] > MARK / 2
        if marked.any():
            out = out + marked.float() * model.sometimes(x)
        return functional.cross_entropy(out, y)

    return Case(model, [torch.optim.AdamW(model.parameters(), lr=0.01)], loss_fn)


def mark_first(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[0, 0] = MARK
    return x


def normalised() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model.register_buffer("constant", torch.full((5,), 1 / 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Case(model, [optimizer], lambda x, y: functional.cross_entropy(model(x), y))


def channels_last() -> Case:
    """Parameters whose memory is not in the order of their dimensions."""
    model = nn.Sequential(nn.Conv2d(2, 4, (1, 3)), nn.Flatten(), nn.Linear(4, 3))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Case(model, [optimizer], lambda x, y: functional.cross_entropy(model(x.view(-1, 2, 1, 3)), y))


CASES: dict[str, Callable[[], Case]] = {
    case.__name__: case for case in (mlp, tied_and_frozen, several_types, weighted, branches, normalised, channels_last)
}


def build(name: str) -> Case:
    torch.manual_seed(SEED)
    return CASES[name]()


def state(case: Case) -> dict[str, Any]:
    """As numpy arrays, which cross a pipe by value."""
    modules = case.modules if isinstance(case.modules, dict) else {"": case.modules}
    found = {
        f"{prefix}.{name}": tensor for prefix, module in modules.items() for name, tensor in module.state_dict().items()
    }
    found |= {f"extra {number}": tensor for number, tensor in enumerate(case.extra)}
    return {name: tensor.detach().numpy().copy() for name, tensor in found.items()}


def _parameters(case: Case) -> Iterator[torch.Tensor]:
    for module in case.modules.values() if isinstance(case.modules, dict) else [case.modules]:
        yield from module.parameters()
    for optimizer in case.optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


# -- by hand, and by the strategy --------------------------------------------------------------------------------------


def by_hand(name: str, num_steps: int, *, clip_norm: float | None = None) -> dict[str, Any]:
    """What one process gets on the global batches with plain torch."""
    case = build(name)
    losses = []
    parameters = list({id(parameter): parameter for parameter in _parameters(case)}.values())
    for step in range(num_steps):
        for parameter in parameters:
            parameter.grad = None
        x, y = batch_of(step)
        result = case.loss_fn(mark_first(x) if name == "branches" else x, y)
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        for optimizer in case.optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    return {"state": state(case), "losses": losses}


def share_of(step: int, shares: Sequence[int], rank: int) -> tuple[Any, int]:
    x, y = batch_of(step)
    low = sum(shares[:rank])
    part = slice(low, low + shares[rank])
    return ((x[part], y[part]) if shares[rank] else None), shares[rank]


def one_step(strategy: Updater, case: Case, step: int, shares: Sequence[int], rank: int, name: str = "") -> Agreement:
    batch, samples = share_of(step, shares, rank)
    if name == "branches" and batch is not None and sum(shares[:rank]) == 0:
        batch = (mark_first(batch[0]), batch[1])
    contribution = strategy.compute(case.loss_fn, batch, samples=samples, total=TOTAL, step=step)
    agreement = strategy.exchange(contribution, Notice(step))
    strategy.apply(agreement)
    return agreement


def train(group: Group | None, name: str, shares: Sequence[int], num_steps: int, **options: Any) -> dict[str, Any]:
    """In a process of a crew, or alone."""
    case = build(name)
    strategy = Updater(case.modules, case.optimizers, SessionOptions(**options))
    rank = group.rank if group is not None else 0
    strategy.bind(group, rank, len(shares))
    agreements = [one_step(strategy, case, step, shares, rank, name) for step in range(num_steps)]
    found = {
        "state": state(case),
        "losses": [agreement.loss for agreement in agreements],
        "norms": [agreement.norm for agreement in agreements],
        "digest": strategy.gradients.state_digest(),
        "without": [
            parameter_name
            for module in (case.modules.values() if isinstance(case.modules, dict) else [case.modules])
            for parameter_name, parameter in module.named_parameters()
            if parameter.grad is None
        ],
    }
    strategy.close()
    return found


def train_with(group: Group, name: str, shares: Sequence[int], num_steps: int, options: dict[str, Any]) -> Any:
    return train(group, name, shares, num_steps, **options)
