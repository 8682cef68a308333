"""What the all-reduce strategy refuses, each by name and with a remedy.

Settings and models that cannot work are refused when the strategy is built, with `ValueError` or `TypeError`; a
gradient of the wrong kind, and a step that the user takes himself, when they occur, with `StrategyError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.errors import StrategyError
from paceline.wire.dtypes import NAMES

_SPARSE_REMEDY = "make the Embedding with sparse=False, and use a dense optimizer"


def check_models(modules: Mapping[str, torch.nn.Module]) -> None:
    for prefix, module in modules.items():
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"expected a torch.nn.Module, a list or a dict of them, not {type(module).__name__}")
        for name, part in module.named_modules():
            if isinstance(part, torch.nn.parallel.DistributedDataParallel):
                raise ValueError(
                    f"{prefix}{name or 'the model'} is wrapped in DistributedDataParallel, which reduces gradients as "
                    "well; give the bare module"
                )
            if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse:
                raise ValueError(
                    f"{prefix}{name} gives sparse gradients, which all-reduce does not take; {_SPARSE_REMEDY}"
                )


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    if not optimizers:
        raise ValueError("there is no optimizer; give the one, or the list of those, that update the model")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"expected a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS evaluates the loss several times in a step, which one all-reduce cannot give; use SGD, Adam or "
                "another optimizer that needs no closure"
            )
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise ValueError(f"SparseAdam takes sparse gradients, which all-reduce does not give; {_SPARSE_REMEDY}")
    _check_distinct(optimizers)


def _check_distinct(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    owners: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (owner := owners.setdefault(id(parameter), number)) != number:
                    is_same = optimizers[owner] is optimizer
                    what = "are the same" if is_same else f"share a parameter of shape {tuple(parameter.shape)}"
                    raise ValueError(
                        f"optimizers {owner} and {number} {what}: each step would update it twice; give each parameter "
                        "to one optimizer, once"
                    )


def check_updated(modules: Mapping[str, torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    updated = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
    owned = [one for module in modules.values() for one in module.parameters()]
    if owned and not any(id(one) in updated for one in owned):
        raise ValueError(
            "no optimizer has a parameter of the model: was it made for another one, or before parameters were "
            "replaced?"
        )


def check_parameters(parameters: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in parameters.items():
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(f"{name} has no shape yet; run the model once on a batch before it is trained")
        if parameter.device.type == "meta":
            raise ValueError(f"{name} is on the meta device and has no values; make it with to_empty and initialise it")
        if parameter.device.type != "cpu":
            raise ValueError(
                f"{name} is on {parameter.device}: parameters on {parameter.device.type} are not supported yet: "
                "Paceline reduces CPU tensors; move the model to the CPU"
            )
        if parameter.layout != torch.strided or parameter.dtype not in NAMES:
            raise ValueError(
                f"{name} is a {parameter.layout} tensor of {parameter.dtype}; use a dense one of a usual type"
            )
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ValueError("no parameter is trainable; set requires_grad of those that are to be trained")


def check_known(
    before: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """What came into the model since must be in an optimizer: `before` are the parameters as they were, by name."""
    known = {id(one) for one in before.values()}
    strangers = {name: one for name, one in now.items() if one.requires_grad and id(one) not in known}
    if not strangers:
        return
    updated = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
    for name, stranger in strangers.items():
        if id(stranger) not in updated:
            what = "is another one than" if name in before else "was not there"
            raise StrategyError(
                f"the parameter {name} of the model {what} when the session was made, and no optimizer has it: it "
                "would be neither trained nor the same on all workers. Replace layers (model.fc = ...) before the "
                "optimizer and the session are made; give new values to the old ones by load_state_dict or copy_"
            )


def check_gradient(name: str, gradient: torch.Tensor) -> None:
    if gradient.layout != torch.strided:
        raise StrategyError(f"{name} got a sparse gradient, which all-reduce does not take; {_SPARSE_REMEDY}")


class StepGuard:
    """Lets the optimizers step only inside `with guard`: a step that the user takes himself would be a second one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._open = False
        self._handles = [optimizer.register_step_pre_hook(self._check) for optimizer in optimizers]

    def _check(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._open:
            raise StrategyError(
                f"{type(optimizer).__name__}.step() was called by the script, but Paceline takes the step itself, with "
                "the gradients of all workers; remove this call, and zero_grad() and backward() with it"
            )

    def __enter__(self) -> None:
        self._open = True

    def __exit__(self, *_: object) -> None:
        self._open = False

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
