"""BatchNorm over the global batch: workers exchange sums, so that each normalises by the samples of all.

Usually a worker normalises by its own share. With `batch_norm="sync"` each layer adds up, over all workers, the number
of its values, their sum and the sum of their squares in the forward pass, and two sums of gradients in the backward
pass. Output, gradients and running statistics are then those of one process, to rounding.

The exchange happens inside `loss_fn`, so:

- Layers behave so only while a step is computed with others. Elsewhere (alone, warm-up, validation, the script's own
  calls) a layer is what it was; so are its names in the `state_dict`, and a copy of the model.
- All workers must come to the same exchanges in the same order. Each attempt begins with a roll call: who has how many
  samples, in how many pieces. What does not go together is an error on all of them. Each exchange says which layer it
  is of: layers that are called in another order, or more often, are an error too, never a wrong sum.
- A member that dies ends the exchange on all others with `GroupError`, as it ends a reduction. The error passes through
  `loss_fn`; if the script catches it there, it is raised again when `loss_fn` is done.
- No bucket may be sent while backward still runs: when it is full depends on what a worker has learned, and it would
  come between other exchanges than on another worker. So such sessions do not overlap the two.

Sums are added up in float64, and squares around a worker's own mean: a large mean does not drown the variance.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.collective import Group
from paceline.errors import Disagreement, GroupError, Mismatch, StrategyError
from paceline.strategy.header import describe
from paceline.watch import spans

BatchNormName = Literal["local", "sync"]

_OVER = "an attempt at a step ended between two exchanges of batch statistics"
_ALIKE = (
    "with batch_norm='sync' every worker must call the same BatchNorm layers equally often and in the same order, in "
    "forward and in backward; remove what makes loss_fn differ between workers, or use batch_norm='local'"
)
_LOCAL = "or use batch_norm='local', where each worker normalises by its own share"


def check_models(modules: Mapping[str, torch.nn.Module]) -> None:
    """Refuse models whose layers cannot be given another forward pass."""
    for prefix, root in modules.items():
        for name, module in root.named_modules():
            where = f"{prefix}{name}" or "the model"
            if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
                raise ValueError(
                    f"{where} is compiled, and batch_norm='sync' cannot reach the layers in it; give the plain module, "
                    f"{_LOCAL}"
                )
            if isinstance(module, _BatchNorm) and type(module).forward is not _BatchNorm.forward:
                raise ValueError(
                    f"{where} is a {type(module).__name__} with a forward of its own, which batch_norm='sync' would "
                    f"replace; use BatchNorm1d, 2d or 3d, {_LOCAL}"
                )


class SyncedNorms:
    """`waited_s` is how long the exchanges of the last attempt took: time that says nothing of this worker's speed."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        check_models(modules)
        self._modules = dict(modules)
        self.waited_s = 0.0
        self._failure: GroupError | None = None

    @contextlib.contextmanager
    def together(self, group: Group | None, step: int, samples: int, num_pieces: int) -> Iterator[None]:
        """In here layers normalise by the samples of all members, each of which is in here for the same step."""
        self.waited_s = 0.0
        self._failure = None
        if group is None or not self._call_roll(group, step, samples, num_pieces):
            yield  # who has all of the samples has their statistics
            return
        layers = self._layers()
        for number, (name, layer) in enumerate(layers):
            exchange = functools.partial(self._add_up, group, step, number, name)
            layer.forward = functools.partial(_forward, layer, exchange)  # type: ignore[method-assign]
        try:
            yield
            if self._failure is not None:
                raise self._failure
        except Exception as error:
            if not isinstance(error, Disagreement):  # which all members get
                group.abort(_OVER)  # the others wait in an exchange for this one
            if self._failure is not None and error is not self._failure:
                raise self._failure from error
            raise
        finally:
            for _, layer in layers:
                del layer.forward

    def _layers(self) -> list[tuple[str, _BatchNorm]]:
        found: dict[int, tuple[str, _BatchNorm]] = {}
        for prefix, root in self._modules.items():
            for name, module in root.named_modules():
                if isinstance(module, _BatchNorm):
                    found.setdefault(id(module), (f"{prefix}{name}", module))
        return list(found.values())

    def _call_roll(self, group: Group, step: int, samples: int, num_pieces: int) -> bool:
        """Whether statistics are to be exchanged; an error on all if they must be and cannot."""
        roll = torch.zeros((group.size, 2), dtype=torch.int64)
        roll[group.rank] = torch.tensor([samples, num_pieces])
        began = time.monotonic()
        before = spans.mark("statistics")
        group.all_reduce(roll)
        spans.mark(before)
        self.waited_s += time.monotonic() - began
        trouble = judge_roll([(int(have), int(pieces)) for have, pieces in roll.tolist()], lambda r: describe(group, r))
        if trouble:
            _wait_until_seen(group)
            raise StrategyError(f"step {step}: {trouble}")
        return int((roll[:, 0] > 0).sum()) > 1

    def _add_up(
        self, group: Group, step: int, number: int, name: str, sums: torch.Tensor, is_backward: bool
    ) -> torch.Tensor:
        """The sums over all members."""
        where = f"step {step}, {'backward' if is_backward else 'forward'} of the BatchNorm layer {name}"
        if self._failure is not None:
            raise self._failure  # whoever caught it goes on in vain
        tag = 2.0 * number + is_backward
        # In two dimensions, which no bucket has: none can pass for this.
        block = torch.cat([sums.reshape(-1), torch.tensor([tag, tag * tag], dtype=torch.float64)]).view(1, -1)
        began = time.monotonic()
        before = spans.mark("statistics")
        try:
            group.all_reduce(block)
        except Mismatch as error:
            if error.is_internal:
                raise
            raise Disagreement(f"{where}: another worker is elsewhere; {_ALIKE} ({error})") from error
        except GroupError as error:
            self._failure = error
            raise
        finally:
            self.waited_s += time.monotonic() - began
            spans.mark(before)
        total, squares = block[0, -2:].tolist()
        if group.size * squares != total * total:  # equal only if all tags are
            _wait_until_seen(group)
            raise Disagreement(f"{where}: another worker is at another layer; {_ALIKE}")
        return block[0, :-2].view(sums.shape)


def _wait_until_seen(group: Group) -> None:
    """Until all members have seen what is wrong. Else the first to end because of it would look like a death to one
    that is still reading, which would try again with whoever is left."""
    with contextlib.suppress(GroupError):
        group.barrier()


def norms_for(name: BatchNormName, modules: Mapping[str, torch.nn.Module]) -> SyncedNorms | None:
    """None where each worker normalises by its own samples."""
    return SyncedNorms(modules) if name == "sync" else None


def together(
    norms: SyncedNorms | None, group: Group | None, step: int, samples: int, num_pieces: int
) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if norms is None else norms.together(group, step, samples, num_pieces)


@contextlib.contextmanager
def explaining(norms: SyncedNorms | None, step: int) -> Iterator[None]:
    """In here workers reduce what they have computed. One that is still at a layer does something else: say so."""
    try:
        yield
    except Mismatch as error:
        if norms is None or error.is_internal:
            raise
        raise Disagreement(f"step {step}: the workers do not fit together; {_ALIKE} ({error})") from error


def no_memory(step: int, samples: int) -> StrategyError:
    return StrategyError(
        f"step {step}: memory does not suffice for {samples} samples at a time, and batch_norm='sync' does not let one "
        f"worker compute in more pieces than the others; use a smaller global_batch, give this worker a smaller share, "
        f"{_LOCAL}"
    )


def no_weight(step: int) -> StrategyError:
    return StrategyError(
        f"step {step}: loss_fn returned the weight 0, so this worker makes no backward pass, and batch_norm='sync' "
        f"needs all workers in it; leave samples without weight out of the data, {_LOCAL}"
    )


def judge_roll(roll: list[tuple[int, int]], name_of: Any) -> str:
    """Why statistics cannot be exchanged between members with so many samples, in so many pieces; empty if they can, or
    need not be because one member has all samples. The same on all members."""
    taking = [rank for rank, (samples, _) in enumerate(roll) if samples]
    if len(taking) <= 1:
        return ""
    if idle := [rank for rank in range(len(roll)) if rank not in taking]:
        return (
            f"{name_of(idle[0])} has a share of 0 samples, so it calls no BatchNorm layer, and batch_norm='sync' needs "
            f"all workers in each; give every worker a share, {_LOCAL}"
        )
    fewest, most = (pick(taking, key=lambda rank: roll[rank][1]) for pick in (min, max))
    if roll[fewest][1] != roll[most][1]:
        return (
            f"{name_of(fewest)} computes its {roll[fewest][0]} samples in {roll[fewest][1]} pieces, {name_of(most)} "
            f"its {roll[most][0]} in {roll[most][1]}, and batch_norm='sync' needs as many on each; use "
            f"micro_batch=None, equal shares (--shares equal), {_LOCAL}"
        )
    return ""


# -- one layer ---------------------------------------------------------------------------------------------------------


def _forward(layer: _BatchNorm, exchange: Any, x: torch.Tensor) -> torch.Tensor:
    """As `_BatchNorm.forward`, with the statistics of all workers."""
    if not layer.training and (layer.running_mean is not None or layer.running_var is not None):
        return _BatchNorm.forward(layer, x)
    layer._check_input_dim(x)  # type: ignore[no-untyped-call]
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    normal, mean, variance, count = _Normalise.apply(x.to(compute), exchange, layer.eps)  # type: ignore[no-untyped-call]
    if layer.training and layer.track_running_stats:
        _track(layer, mean, variance, count)
    shape = [1, -1] + [1] * (x.dim() - 2)
    out: torch.Tensor = normal
    if layer.affine:
        out = out * layer.weight.view(shape) + layer.bias.view(shape)
    return out.to(x.dtype)


@torch.no_grad()
def _track(layer: _BatchNorm, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
    factor = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1.0 / float(layer.num_batches_tracked)
    factor = factor or 0.0
    unbiased = variance * (count / (count - 1.0))
    for running, new in ((layer.running_mean, mean), (layer.running_var, unbiased)):
        if running is not None:
            running.mul_(1.0 - factor).add_(new.to(running.dtype), alpha=factor)


class _Normalise(torch.autograd.Function):
    """Values less their mean, over their deviation, by channel: those of all workers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Any, eps: float) -> Any:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        num = x.numel() // x.shape[1]
        own_sum = x.sum(dims, dtype=torch.float64)
        own_mean = own_sum / max(1, num)
        around = (x - own_mean.to(x.dtype).view(shape)).square().sum(dims, dtype=torch.float64)
        # Around the mean as it was rounded, which is what was taken off.
        shift = own_mean.to(x.dtype).double()
        squares = around + 2.0 * shift * own_sum - num * shift.square()
        sums = exchange(torch.stack([own_sum, squares, torch.full_like(own_sum, num)]), False)
        count = float(sums[2, 0])
        if count <= 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got {count:.0f} over all workers")
        mean = sums[0] / count
        variance = (sums[1] / count - mean.square()).clamp_(min=0.0)
        scale = (variance + eps).rsqrt().to(x.dtype).view(shape)
        normal = (x - mean.to(x.dtype).view(shape)) * scale
        ctx.save_for_backward(normal, scale)
        ctx.exchange, ctx.count, ctx.dims, ctx.shape = exchange, count, dims, shape
        ctx.mark_non_differentiable(mean, variance)
        return normal, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        normal, scale = ctx.saved_tensors
        own = [part.sum(ctx.dims, dtype=torch.float64) for part in (gradient, gradient * normal)]
        means = (ctx.exchange(torch.stack(own), True) / ctx.count).to(gradient.dtype)
        along, across = (part.view(ctx.shape) for part in means)
        return (gradient - along - normal * across) * scale, None, None
