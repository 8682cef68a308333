"""Contents for the tests of checkpoints, and how to compare them."""

from __future__ import annotations

from typing import Any

import torch

from paceline.checkpoint import Contents


def contents(operation: int = 7, **changed: Any) -> Contents:
    fields: dict[str, Any] = {
        "run": "night",
        "step": operation,
        "operation": operation,
        "epoch": 2,
        "position": 640,
        "model": weights(operation),
        "state": {"optimizer": {"state": {0: {"step": torch.tensor(3.0), "avg": torch.ones(5) * operation}}}},
        "plan": {"generation": 4, "shares": {0: 12, 1: 20}, "order": ("a", "b")},
    }
    return Contents(**{**fields, **changed})


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    shared = torch.rand(4, 3, generator=made)
    return {
        "encoder.weight": shared,
        "half": torch.rand(5, generator=made).to(torch.bfloat16),
        "turned": torch.rand(3, 4, generator=made).t(),
        "every second": torch.arange(10)[::2],
        "count": torch.tensor(seed),
        "nothing": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
        "complex": torch.rand(2, generator=made).to(torch.complex128),
        "decoder.weight": shared,
    }


def assert_same(found: Contents, expected: Contents) -> None:
    for field in ("run", "operation", "epoch", "position", "plan"):
        assert getattr(found, field) == getattr(expected, field)
    assert list(found.model) == list(expected.model)
    for name, tensor in expected.model.items():
        assert found.model[name].dtype == tensor.dtype
        assert torch.equal(found.model[name], tensor)
    mine, theirs = (one.state["optimizer"]["state"][0] for one in (found, expected))
    assert all(torch.equal(mine[name], theirs[name]) for name in ("step", "avg"))
