"""The training state of a worker: what an update changes, and what the loop body changes.

An *update* changes the weights, the buffers and what the optimizers keep for each parameter. The *body* of the user's
loop changes the rest: learning rates, schedules, averages, the user's own values. A newcomer needs both. Who is one
operation behind needs the first only: its own body will run for that operation when it has caught up.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from paceline.checkpoint.tree import Ties
from paceline.checkpoint.weights import LEFT_OUT, load_weights, plain_name, weights_of
from paceline.strategy.base import StrategyState


@runtime_checkable
class Stateful(Protocol):
    """A schedule, an average of weights, a scaler: whatever must survive and reach newcomers."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


def frozen_weights(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """The parameters that are not trained, by name: they require no gradient, and no optimizer has updated them."""
    return [
        name
        for name, value in weights_of(model, keep_vars=True).items()
        if isinstance(value, nn.Parameter)
        and not value.requires_grad
        and not any(value in optimizer.state for optimizer in optimizers)
    ]


def _checksum(value: torch.Tensor) -> int:
    """Of its first values: it tells one model from another."""
    return zlib.crc32(value.detach().flatten()[:1024].cpu().view(torch.uint8).numpy().tobytes())


class TrainingState:
    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        others: Sequence[Stateful],
        elsewhere: StrategyState,
        *,
        only_trained: bool = False,
    ) -> None:
        """With `only_trained`, what is for a checkpoint has no frozen parameters."""
        self._elsewhere = elsewhere
        self._only_trained = only_trained
        self._model = model
        self._optimizers = optimizers
        self._others = others
        self.user: dict[str, Any] = {}
        self._marked: dict[str, Any] | None = None

    def of_update(self) -> dict[str, Any]:
        """Live tensors but for buffers, which a forward pass may change while the others are being sent."""
        model = weights_of(self._model)
        ties, copies = Ties(), dict[str, torch.Tensor]()
        for name, _ in self._model.named_buffers(remove_duplicate=False):
            name = plain_name(name)
            if isinstance(buffer := model.get(name), torch.Tensor):
                # A module that is in the model twice has one buffer under two names, here too.
                first = ties.first_name(buffer, name)
                copies[name] = copies[first] if first != name else buffer.detach().clone()
        model.update(copies)
        states = [optimizer.state_dict()["state"] for optimizer in self._optimizers]
        return {"model": model, "optimizers": states, **self._elsewhere.gift()}

    def of_everything(self) -> dict[str, Any]:
        """The same with what is on servers, for a checkpoint. Values come from there too: where workers update without
        waiting for each other, this worker's own are of another moment than the rest."""
        update, full = self.of_update(), self._elsewhere.full_state()
        values = full.pop("values", {})
        for name, variable in weights_of(self._model, keep_vars=True).items():
            update["model"][name] = values.get(id(variable), update["model"][name])
        if self._only_trained:
            frozen = frozen_weights(self._model, self._optimizers)
            update[LEFT_OUT] = {name: _checksum(update["model"].pop(name)) for name in frozen}
        return {**update, **full}

    def expected_bytes(self) -> int:
        """About how large the state is, before there is one: an optimizer like Adam keeps two values a parameter."""
        weights = sum(value.nbytes for value in self._model.state_dict().values() if isinstance(value, torch.Tensor))
        trained = sum(parameter.nbytes for parameter in self._model.parameters() if parameter.requires_grad)
        return weights + 2 * trained + (1 << 20)

    def of_body(self) -> dict[str, Any]:
        return {
            "kinds": self._kinds(),
            "groups": [optimizer.state_dict()["param_groups"] for optimizer in self._optimizers],
            "others": [other.state_dict() for other in self._others],
            "user": dict(self.user if self._marked is None else self._marked),
        }

    def mark(self) -> None:
        """The loop asks for its next batch: what it changes from here on, before the step, it will change again where
        the state is loaded."""
        self._marked = dict(self.user)

    def unmark(self) -> None:
        """The step is done."""
        self._marked = None

    def load_update(self, part: dict[str, Any], groups: Sequence[Any] | None = None) -> None:
        """Become what an update made; learning rates and the like stay as they are unless given."""
        left_out = part.get(LEFT_OUT, {})
        own = weights_of(self._model) if left_out else {}
        if others := [name for name in left_out if name not in own or _checksum(own[name]) != left_out[name]]:
            raise ValueError(
                f"the checkpoint has no frozen weights, and those of this model are not the ones that the training "
                f"began with: {', '.join(others[:3])}{' and others' if others[3:] else ''}; load these first"
            )
        load_weights(self._model, part["model"], left_out)
        for number, (optimizer, state) in enumerate(zip(self._optimizers, part["optimizers"], strict=True)):
            own = optimizer.state_dict()["param_groups"] if groups is None else groups[number]
            optimizer.load_state_dict({"state": state, "param_groups": own})
        self._elsewhere.load(part)

    def load_elsewhere(self, part: Mapping[str, Any]) -> None:
        """What the strategy keeps, of a checkpoint."""
        self._elsewhere.load(part)

    def load_optimizers(self, states: Sequence[dict[str, Any]]) -> None:
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

    def _kinds(self) -> list[str]:
        return [type(optimizer).__name__ for optimizer in self._optimizers]

    def load(self, update: dict[str, Any], body: dict[str, Any]) -> None:
        if (kinds := body.get("kinds")) is not None and list(kinds) != self._kinds():  # older checkpoints have none
            raise ValueError(
                f"the state is of {', '.join(kinds)}, and this session has {', '.join(self._kinds())}; go on with the "
                "optimizers that the training began with, or begin a new one from the weights (paceline.load_model)"
            )
        self.load_update(update, body["groups"])
        for other, state in zip(self._others, body["others"], strict=True):
            other.load_state_dict(state)
        self._marked = None
        self.user.clear()
        self.user.update(body["user"])
