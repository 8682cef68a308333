"""Wrong arguments are the caller's alone: an error that says what to do, before anything is sent, and the group goes
on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.collective import Group
from paceline.errors import OutOfSharedMemory
from paceline.testing.crew import Crew

WRONG: list[tuple[Callable[[Group], object], type[Exception], str]] = [
    (lambda g: g.all_reduce(torch.zeros(2), "average"), ValueError, "choose one of: sum, mean"),
    (lambda g: g.all_reduce(torch.zeros(2, dtype=torch.int32), "mean"), TypeError, "does not take torch.int32"),
    (lambda g: g.all_reduce(torch.zeros(2), "band"), TypeError, "it takes bool"),
    (lambda g: g.all_reduce(torch.zeros(2, dtype=torch.complex64), "max"), TypeError, "does not take"),
    (lambda g: g.all_reduce(torch.zeros(2), algorithm="magic"), ValueError, "choose auto or one of"),
    (lambda g: g.all_reduce([1.0]), TypeError, "must be a torch.Tensor"),  # type: ignore[arg-type]
    (lambda g: g.all_reduce(torch.zeros(2, device="meta")), TypeError, "host memory"),
    (lambda g: g.all_reduce(torch.eye(2).to_sparse()), TypeError, "to_dense"),
    (lambda g: g.all_reduce(torch.zeros(2), timeout_s=0), ValueError, "not positive"),
    (lambda g: g.broadcast(torch.zeros(2), 2), ValueError, "ranks are 0..1"),
    (lambda g: g.broadcast(torch.zeros(2), -1), ValueError, "ranks are 0..1"),
    (lambda g: g.all_gather([torch.zeros(2)], torch.zeros(2)), ValueError, "one for each rank"),
    (lambda g: g.all_gather([torch.zeros(3), torch.zeros(3)], torch.zeros(2)), ValueError, "must fit"),
    (lambda g: g.gather(torch.zeros(2), None, g.rank), ValueError, "must give outputs"),
    (lambda g: g.scatter(torch.zeros(2), [torch.zeros(2)] * 2, 1 - g.rank), ValueError, "inputs=None"),
    (lambda g: g.all_to_all([torch.zeros(1)] * 2, []), ValueError, "one for each rank"),
    (lambda g: g.send(torch.zeros(1), g.rank), ValueError, "itself"),
    (lambda g: g.send(torch.zeros(1), 1 - g.rank, tag=-1), ValueError, "tag"),
    (lambda g: g.empty((-1,)), ValueError, "0 or more"),
    (lambda g: g.empty((2,), torch.float8_e4m3fn), TypeError, "cannot be sent"),
    (lambda g: g.empty((1 << 44,)), OutOfSharedMemory, "use smaller tensors"),
    (lambda g: g.regroup([1 - g.rank]), ValueError, "only members"),
    (lambda g: g.regroup([0, 1, 1]), ValueError, "distinct"),
]


def check_wrong_arguments(group: Group) -> int:
    for call, error, text in WRONG:
        with pytest.raises(error, match=text.replace("[", r"\[")):
            call(group)
        total = torch.ones(3)
        group.all_reduce(total)
        assert float(total[0]) == 2.0
    return len(WRONG)


@pytest.mark.parametrize("layout", ["aa", "ab"])
def test_wrong_arguments_harm_nobody(layout: str) -> None:
    with Crew(2, hosts=layout) as crew:
        assert crew.run(check_wrong_arguments) == [len(WRONG)] * 2
