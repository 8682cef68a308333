"""Dense blocks do what torch.optim does to whole parameters, wherever these are cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.server.dense import ELEMENTWISE, Block, OptimizerSettings, settings_of

ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}, {"maximize": True}],
    "Adagrad": [{"lr": 0.1}, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5, "weight_decay": 0.01}],
    "Adam": [{"lr": 0.01}, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1, "betas": (0.8, 0.95)}],
    "AdamW": [{"lr": 0.01}, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.3, "maximize": True}],
    "RMSprop": [{"lr": 0.01}, {"lr": 0.01, "momentum": 0.5, "centered": True, "alpha": 0.8}],
    "Adadelta": [{}, {"rho": 0.8, "weight_decay": 0.1}],
    "Adamax": [{}, {"betas": (0.5, 0.9), "weight_decay": 0.1}],
    "NAdam": [{}, {"momentum_decay": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{}, {"betas": (0.5, 0.9), "weight_decay": 0.1}],
}
ALL = [(kind, arguments) for kind, several in ARGUMENTS.items() for arguments in several]
SHAPES = [(7, 3), (5,), (2, 2, 2)]
BOUNDS = [0, 21, 26, 34]  # of these, one behind the other


def make(kind: str, arguments: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    parameters = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    return parameters, ELEMENTWISE[kind](parameters, **arguments)


def flat(tensors: list[Any]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def now(optimizer: torch.optim.Optimizer) -> OptimizerSettings:
    return settings_of(optimizer, optimizer.param_groups[0])


def blocks_of(values: torch.Tensor, cuts: list[int], group: OptimizerSettings) -> list[Block]:
    return [Block(values[low:high].clone(), 0, group) for low, high in itertools.pairwise(cuts)]


def unused_in(unused: set[int], low: int, high: int) -> list[tuple[int, int]]:
    parts = ((max(BOUNDS[one], low), min(BOUNDS[one + 1], high)) for one in sorted(unused))
    return [(start - low, stop - low) for start, stop in parts if start < stop]


def step_both(
    parameters: list[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    blocks: list[Block],
    cuts: list[int],
    unused: set[int],
) -> None:
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    for number, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        parameter.grad = None if number in unused else gradient.clone()
    whole = flat(gradients)
    for number in unused:
        whole[BOUNDS[number] : BOUNDS[number + 1]] = 0.0
    before = whole.clone()
    for block, low, high in zip(blocks, cuts, cuts[1:], strict=False):
        block.update(whole[low:high], now(optimizer), unused_in(unused, low, high))
    optimizer.step()
    assert torch.equal(whole, before), "gradients belong to the worker"


def check_equal(parameters: list[torch.nn.Parameter], blocks: list[Block]) -> None:
    torch.testing.assert_close(torch.cat([block.values for block in blocks]), flat(parameters), rtol=2e-5, atol=2e-6)


def test_all_that_are_supported_are_tested() -> None:
    assert ARGUMENTS.keys() == ELEMENTWISE.keys()


@pytest.mark.parametrize(("kind", "arguments"), ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_equal_whole_parameters_with_changing_settings(
    kind: str, arguments: dict[str, Any], dtype: torch.dtype
) -> None:
    parameters, optimizer = make(kind, arguments, dtype)
    cuts = [0, 10, 23, 34]
    blocks = blocks_of(flat(parameters), cuts, now(optimizer))
    for step in range(6):
        step_both(parameters, optimizer, blocks, cuts, set())
        optimizer.param_groups[0]["lr"] *= 0.7
        if step == 3 and "weight_decay" in optimizer.param_groups[0]:
            optimizer.param_groups[0]["weight_decay"] = 0.2
    check_equal(parameters, blocks)


@pytest.mark.parametrize(("kind", "arguments"), ALL)
def test_what_is_unused_at_times_counts_its_own_updates_also_after_a_move(kind: str, arguments: dict[str, Any]) -> None:
    """A block's state goes through its flat form, as on its way to another server, between any two updates."""
    parameters, optimizer = make(kind, arguments)
    cuts = [0, 10, 23, 34]
    blocks = blocks_of(flat(parameters), cuts, now(optimizer))
    for unused in ({1}, set[int](), {0}, {0, 1, 2}, {2}, {1}, set[int]()):
        step_both(parameters, optimizer, blocks, cuts, unused)
        moved = blocks_of(torch.cat([block.values for block in blocks]), cuts, now(optimizer))
        for old, new in zip(blocks, moved, strict=True):
            new.load_state({name: value.clone() for name, value in old.state().items()})
            assert new.state().keys() == old.state().keys()
        blocks = moved
    check_equal(parameters, blocks)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ALL), st.lists(st.sets(st.integers(0, 2)), max_size=6), st.sets(st.integers(1, 33), max_size=5))
@example(("SGD", {"lr": 0.1, "momentum": 0.9}), [{1}, set()], set())  # torch's fused kernel refuses half a momentum
def test_wherever_it_is_cut_and_whatever_is_unused(
    chosen: tuple[str, dict[str, Any]], schedule: list[set[int]], inner: set[int]
) -> None:
    parameters, optimizer = make(*chosen)
    cuts = [0, *sorted(inner), 34]
    blocks = blocks_of(flat(parameters), cuts, now(optimizer))
    for unused in schedule:
        step_both(parameters, optimizer, blocks, cuts, unused)
    check_equal(parameters, blocks)


def test_unused_parts_keep_every_bit_of_values_and_state() -> None:
    block = Block(torch.randn(8), 0, OptimizerSettings("Adam", {"lr": 0.1, "weight_decay": 0.5}))
    block.update(torch.randn(8), block._settings)
    before = {"values": block.values.clone(), **{name: value.clone() for name, value in block.state().items()}}
    block.update(torch.randn(8), block._settings, [(2, 5)])
    after = {"values": block.values, **block.state()}
    for name in ("values", "exp_avg", "exp_avg_sq"):
        assert torch.equal(before[name][2:5], after[name][2:5]), name
        assert not torch.equal(before[name][:2], after[name][:2]), name
    assert after["step"].tolist() == [2, 2, 1, 1, 1, 2, 2, 2]
    assert block.num_bytes >= 3 * 8 * 4


def test_a_learning_rate_that_is_a_tensor_and_settings_that_servers_do_not_need() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([parameter], lr=torch.tensor(0.25), foreach=False)
    found = settings_of(optimizer, optimizer.param_groups[0])
    assert found.values["lr"] == 0.25
    assert not {"foreach", "fused", "capturable", "differentiable", "params"} & found.values.keys()


class Own(torch.optim.SGD):
    pass


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Rprop, torch.optim.ASGD, Own])
def test_optimizers_that_cannot_be_cut_are_refused_by_name(kind: Any) -> None:
    optimizer = kind([torch.nn.Parameter(torch.zeros(2, 2))], lr=0.1)
    with pytest.raises(ValueError, match=rf"{kind.__name__} cannot run on servers.*use one of SGD"):
        settings_of(optimizer, optimizer.param_groups[0])


def test_a_state_of_another_size_is_refused() -> None:
    block = Block(torch.zeros(4), 0, OptimizerSettings("Adam", {"lr": 0.1}))
    with pytest.raises(ValueError, match=r"exp_avg has the shape \(3,\)"):
        block.load_state({"step": torch.ones(1), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(4)})
