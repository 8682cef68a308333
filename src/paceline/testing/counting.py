"""A model that counts its samples in its weights: it tells, of any model or checkpoint, which samples it holds.

    case = Counting(length=96, batch=8)
    model = case.model()
    session = Session(model, case.optimizer(model), data=case.data(), global_batch=case.batch, seed=case.seed, ...)
    ... session.step(case.loss_fn(model), batch) ...
    assert case.faults_of_model(model.state_dict(), epochs=3) == []      # each sample three times, in every copy
    assert case.faults_of_checkpoint(contents) == []                     # what its records say, in every range

Each sample is its own number. The loss of a batch is the mean of minus the weights of its samples, so that an update
moves the weight of each of them by one known step, and of nothing else. There are several `copies` of the weights, to
have several ranges on servers; with `has_table` there is a row for each sample too. By `rule`:

    sgd       the learning rate is the global batch: a weight is the number of updates that had its sample
    adagrad   after n updates a weight is 1 + 1/sqrt(2) + ... + 1/sqrt(n), and what the optimizer keeps is n / batch**2,
              so that weights and optimizer state of different moments are told apart

The length must be a multiple of the batch: the samples of a shorter one would move further.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

from paceline.checkpoint import Contents
from paceline.control.leases.lease_set import LeaseSet
from paceline.nn import Embedding
from paceline.server.layout import FEWEST_ELEMENTS, RangeLayout, lay_out
from paceline.testing.learned import Learned

_MOST = 4096  # updates that are told apart
_NEAR = 1e-2


class Numbers(Dataset[torch.Tensor]):
    """Each sample is its number."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class CountingModel(nn.Module):
    def __init__(self, length: int, copies: int, *, has_table: bool) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(copies, length))
        self.table = Embedding(1, init="zeros") if has_table else None

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum of the weights of each sample."""
        found = self.counts[:, numbers].sum(0)
        return found if self.table is None else found + self.table(numbers)[:, 0]


class Counting(NamedTuple):
    length: int
    batch: int
    seed: int = 0
    copies: int = 1
    rule: Literal["sgd", "adagrad"] = "sgd"
    has_table: bool = False

    @property
    def num_leases(self) -> int:
        """Of an epoch; as many as there are steps in a synchronous training."""
        return self.length // self.batch

    def in_ranges(self, count: int) -> Counting:
        """The same with so many copies that there are at least these many ranges on servers."""
        return self._replace(copies=-(-count * FEWEST_ELEMENTS // self.length))

    # -- what is trained ---------------------------------------------------------------------------------------------

    def data(self) -> Numbers:
        if self.length % self.batch:
            raise ValueError(f"length={self.length} must be a multiple of batch={self.batch}")
        return Numbers(self.length)

    def model(self) -> CountingModel:
        return CountingModel(self.length, self.copies, has_table=self.has_table)

    def optimizer(self, model: CountingModel) -> torch.optim.Optimizer:
        if self.rule == "adagrad":
            return torch.optim.Adagrad(model.parameters(), lr=1.0)
        return torch.optim.SGD(model.parameters(), lr=float(self.batch))

    def loss_fn(self, model: CountingModel) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda numbers: -model(numbers).mean()

    # -- what it holds -----------------------------------------------------------------------------------------------

    def counts_of(self, weights: torch.Tensor) -> torch.Tensor:
        """How many updates each weight has had. A ValueError names a weight that no number of updates comes to."""
        weights = weights.detach().double().contiguous()
        numbers = torch.arange(_MOST, dtype=torch.float64)
        values = numbers.clone()
        if self.rule == "adagrad":
            values = torch.cat([torch.zeros(1, dtype=torch.float64), (1.0 / numbers[1:].sqrt()).cumsum(0)])
        above = torch.searchsorted(values, weights).clamp(1, _MOST - 1)
        is_below = weights - values[above - 1] < values[above] - weights
        found = torch.where(is_below, above - 1, above)
        bad = ((weights - values[found]).abs() > _NEAR).nonzero()
        if len(bad):
            where = tuple(bad[0].tolist())
            raise ValueError(f"the weight {where} is {weights[where].item():g}, which no number of updates comes to")
        return found

    def faults_of_model(self, state: Mapping[str, Any], epochs: int) -> list[str]:
        """Where a state_dict does not hold every sample so many times, in words; none if it does."""
        counts = self.counts_of(state["counts"])
        return _differing("the model", counts, torch.full_like(counts, epochs))

    def faults_of_checkpoint(self, contents: Contents, *, leased: bool) -> list[str]:
        """Where weights, optimizer state and rows are not those of the samples that the checkpoint says it has: by its
        lease records, range by range, or by its cursor."""
        model = self.model()
        layout = lay_out({"counts": model.counts}, [self.optimizer(model)], has_tables=self.has_table)
        expected = self._expected_by_range(contents, layout, leased=leased)
        wanted = torch.cat([expected[number][span.start : span.stop] for number, span in enumerate(layout.spans)])
        counts = self.counts_of(contents.model["counts"])
        faults = _differing("the model", counts, wanted.view(counts.shape))
        if self.rule == "adagrad" and (kept := contents.state["optimizers"][0].get(0)):
            sums = (kept["sum"].double() * self.batch**2).round().to(torch.int64)
            faults += _differing("the optimizer", sums, wanted.view(counts.shape))
            faults += self._faults_of_steps(contents, len(layout.spans), float(kept["step"])) if leased else []
        if layout.partitions is not None:
            tree = contents.state["tables"].get("table", {})
            ids = tree.get("ids", torch.empty(0, dtype=torch.int64))
            found = torch.zeros(self.length, dtype=torch.int64)
            found[ids] = self.counts_of(tree["rows"][:, 0]) if len(ids) else found[ids]
            numbers = torch.arange(self.length)
            by_range = torch.stack([expected[number][: self.length] for number in range(layout.num_ranges)])
            faults += _differing("the table", found[None], by_range[layout.partitions.of(numbers), numbers][None])
            if len(ids) != len(ids.unique()):
                faults.append("the table: ids come more than once")
        return faults

    def _faults_of_steps(self, contents: Contents, num_ranges: int, step: float) -> list[str]:
        """How often the optimizer was called for each range."""
        faults = []
        for number in range(num_ranges):
            epoch, prefix, beyond = contents.state["leases"][str(number)]
            found = float(contents.state["counts"].get(str(number), {}).get("step", step))
            wanted = epoch * self.num_leases + prefix + len(beyond)
            if found != wanted:
                faults.append(f"range {number}: its optimizer has counted {found:g} updates, not {wanted}")
        return faults

    def _expected_by_range(self, contents: Contents, layout: RangeLayout, *, leased: bool) -> list[torch.Tensor]:
        """For each range, how many updates each weight of all copies should have."""
        if not leased:
            done = LeaseSet(contents.epoch, contents.position // self.batch)
            return [self._expected(done).repeat(self.copies)] * layout.num_ranges
        records = contents.state["leases"]
        found = []
        for number in range(layout.num_ranges):
            epoch, prefix, beyond = records[str(number)]
            found.append(self._expected(LeaseSet(epoch, prefix, set(beyond))).repeat(self.copies))
        return found

    def _expected(self, done: LeaseSet) -> torch.Tensor:
        leases = (lease for lease in range(self.num_leases) if done.has(done.epoch, lease))
        learned = Learned(self.length, self.batch, self.seed).of(done.epoch, leases)
        return done.epoch + torch.from_numpy(learned).to(torch.int64)


def _differing(what: str, counts: torch.Tensor, wanted: torch.Tensor) -> list[str]:
    bad = (counts != wanted).nonzero().tolist()
    if not bad:
        return []
    numbers = sorted({number for _, number in bad})
    copy, number = bad[0]
    return [
        f"{what}: {len(numbers)} samples ({numbers[:8]}...) in {len({copy for copy, _ in bad})} of {len(counts)} copies"
        f" do not count as they should: sample {number} of copy {copy} {int(counts[copy, number])} times, not "
        f"{int(wanted[copy, number])}"
    ]
