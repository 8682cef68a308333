"""Embeddings without a vocabulary do what torch's do with the same rows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.nn import Embedding, EmbeddingBag, tables_in
from paceline.train.session import Session

IDS = torch.tensor([5, -7, 5, 2**62, 0, -7])


def dense_of(table: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of all ids as a weight for torch, and the ids as numbers there."""
    unique, numbers = torch.unique(ids, return_inverse=True)
    with torch.no_grad():
        rows, where = table.rows_of(unique)
        return rows[where].clone(), numbers


@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 6, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_embedding_equals_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    table = Embedding(3, name="t", dtype=dtype)
    ids = IDS.view(shape)
    weight, numbers = dense_of(table, ids)
    found = table(ids)
    assert torch.equal(found, F.embedding(numbers, weight))
    assert found.shape == (*shape, 3)
    assert found.dtype == dtype


BAGS: list[tuple[torch.Tensor, torch.Tensor | None]] = [
    (IDS.view(2, 3), None),
    (IDS, torch.tensor([0, 2])),
    (IDS, torch.tensor([0, 0, 2, 2, 6])),  # with empty bags
    (IDS[:0], torch.tensor([0, 0])),  # nothing but empty bags
]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(("ids", "offsets"), BAGS)
def test_a_bag_equals_torchs(mode: Any, ids: torch.Tensor, offsets: torch.Tensor | None) -> None:
    bag = EmbeddingBag(3, mode=mode, name="t", init="uniform")
    weight, numbers = dense_of(bag, ids)
    assert torch.equal(bag(ids, offsets), F.embedding_bag(numbers, weight, offsets, mode=mode))


def test_a_bag_with_weights_for_samples() -> None:
    bag = EmbeddingBag(3, mode="sum", name="t")
    weights = torch.rand(2, 3, requires_grad=True)
    weight, numbers = dense_of(bag, IDS.view(2, 3))
    found = bag(IDS.view(2, 3), per_sample_weights=weights)
    torch.testing.assert_close(found, F.embedding_bag(numbers, weight, mode="sum", per_sample_weights=weights))
    found.sum().backward()
    assert weights.grad is not None
    with pytest.raises(NotImplementedError, match="sum"):
        EmbeddingBag(3, mode="mean")(IDS.view(2, 3), per_sample_weights=weights)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_ids_of_other_integer_types(dtype: torch.dtype) -> None:
    table = Embedding(3)
    assert torch.equal(table(torch.tensor([5, 7], dtype=dtype)), table(torch.tensor([5, 7])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.uint64])
def test_ids_that_are_no_integers_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"Embedding 'users': ids are torch\..*; give int64"):
        Embedding(3, name="users")(torch.zeros(2, dtype=dtype))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Embedding(0), "dim=0"),
        (lambda: Embedding(2.5), "dim=2.5"),  # type: ignore[arg-type]
        (lambda: Embedding(2, cache=-1), "cache=-1"),
        (lambda: EmbeddingBag(2, mode="median"), "mode='median'"),  # type: ignore[arg-type]
    ],
)
def test_what_no_table_can_be(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_no_ids_give_no_rows() -> None:
    assert Embedding(3)(torch.empty((0, 2), dtype=torch.int64)).shape == (0, 2, 3)


# -- training --------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    users: Any

    def __init__(self, users: nn.Module) -> None:
        super().__init__()
        self.users = users
        self.leave = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.leave(self.users(ids))[:, 0]
        return out


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda found: torch.optim.SGD(found, lr=0.3),
    "adagrad": lambda found: torch.optim.Adagrad(found, lr=0.3),
}


def session_of(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Session:
    data = [(number, float(number % 3)) for number in range(12)]
    return Session(model, optimizer, data=data, global_batch=4, seed=5, **options)


def train(model: nn.Module, session: Session, epochs: int = 3) -> list[float]:
    losses = []
    for epoch in session.epochs(epochs):
        for batch in epoch:
            loss = session.step(lambda ids, y: F.mse_loss(model(ids), y.float()), batch)
            losses.append(loss)
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_training_alone_equals_torchs_embedding(name: str, micro_batch: int | None) -> None:
    """Where rows that get no gradient do not move under torch's optimizer either."""
    torch.manual_seed(0)
    model = Net(Embedding(4, init="uniform"))
    with session_of(model, OPTIMIZERS[name](model.parameters()), micro_batch=micro_batch) as session:
        with torch.no_grad():
            start = model.users(torch.arange(12)).clone()
        other = Net(nn.Embedding(12, 4, _weight=start.clone()))
        other.leave = copy.deepcopy(model.leave)
        losses = train(model, session)
        rows = model.users(torch.arange(12)).detach()
    with session_of(other, OPTIMIZERS[name](other.parameters())) as session:
        expected = train(other, session)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    torch.testing.assert_close(rows, other.users.weight.detach())
    assert not torch.equal(rows, start)


def test_a_table_that_is_used_twice_adds_up_its_gradients() -> None:
    table = Embedding(2, init="zeros")

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here, self.there = table, table

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = (self.here(ids) + self.there(ids)).sum(1)
            return out

    model = Twice()
    with session_of(model, torch.optim.SGD(model.parameters(), lr=0.25)) as session:
        for epoch in session.epochs(1):
            for batch in epoch:
                session.step(lambda ids, y: model(ids).sum(), batch)
        rows = table(torch.arange(12)).detach()
    # 2 a use of an id, times 4 samples: loss_fn gives a sum where a mean is expected, over the whole batch.
    assert rows.unique().tolist() == [-0.5]


def test_a_frozen_table_does_not_move() -> None:
    model = Net(Embedding(4))
    model.users.weight.requires_grad_(False)
    with session_of(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        before = model.users(torch.arange(12)).detach().clone()
        train(model, session, 1)
        assert torch.equal(model.users(torch.arange(12)).detach(), before)


def test_a_model_that_was_used_before_its_session_and_is_used_after_it() -> None:
    model = Net(Embedding(4))
    model(torch.arange(3)).sum().backward()
    with session_of(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        train(model, session, 1)
        trained = model.users(torch.arange(12)).detach().clone()
    assert torch.equal(model.users(torch.arange(12)).detach(), trained), "what was trained is not forgotten"


def test_copies_state_and_pickles_of_a_model_also_in_a_session() -> None:
    model = Net(Embedding(4, name="u"))
    pickle.loads(pickle.dumps(model))
    with session_of(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        train(model, session, 1)
        average = torch.optim.swa_utils.AveragedModel(model)
        with torch.no_grad():
            assert torch.equal(average(torch.arange(12)), model(torch.arange(12))), "a copy sees the trained rows"
        average.update_parameters(model)
        assert model.state_dict()["users.weight"].shape == (0, 4)
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        again = pickle.loads(pickle.dumps(model))
        assert again.users.table_name == "u"
        assert again(torch.arange(3)).shape == (3,), "it has rows of its own"
        train(model, session, 2)
        with torch.no_grad():
            rows = model.users(torch.arange(12))
            copied: Any = average.module
            assert torch.equal(copied.users(torch.arange(12)), rows), "and those of later steps"


def test_names_of_tables() -> None:
    model = nn.ModuleDict({"a": Embedding(2), "b": Embedding(2, name="shared"), "c": nn.Linear(2, 2)})
    assert [name for name, _ in tables_in(model)] == ["a", "shared"]
    assert repr(Embedding(2)) == "Embedding(dim=2, rows of any id)"


@pytest.mark.parametrize(
    ("make", "optimizer", "message"),
    [
        (
            lambda: {"a": Embedding(2, name="t"), "b": Embedding(3, name="t")},
            torch.optim.SGD,
            "two tables are called 't'",
        ),
        (lambda: {"a": Embedding(2)}, torch.optim.RMSprop, "table 'a' is in RMSprop, which has no rule for rows"),
        (lambda: {"a": Embedding(2, rowwise=True)}, torch.optim.SGD, "rowwise=True; sgd has no second moment"),
        (lambda: {"a": Embedding(2, admit_after=-1)}, torch.optim.SGD, "admit_after=-1"),
        (lambda: {"a": Embedding(2, dtype=torch.int32)}, torch.optim.SGD, "gradient"),
    ],
)
def test_tables_that_a_session_refuses(make: Any, optimizer: Any, message: str) -> None:
    def attempt() -> None:
        model = nn.ModuleDict(make())
        session_of(model, optimizer([*model.parameters(), nn.Parameter(torch.zeros(2))], lr=0.1))

    with pytest.raises((ValueError, RuntimeError), match=message):
        attempt()


def test_a_table_in_no_optimizer_is_named() -> None:
    model = Net(Embedding(4))
    with pytest.raises(ValueError, match="table 'users' is in no optimizer; give its weight to one"):
        session_of(model, torch.optim.SGD(model.leave.parameters(), lr=0.1))
