"""What follows from the rows of a header. Every rank sees the same rows, so all raise the same or none does."""

from __future__ import annotations

import msgspec

from paceline.collective import Group
from paceline.errors import Disagreement, Diverged, StrategyError
from paceline.strategy import digests
from paceline.strategy.base import Flag
from paceline.strategy.header import HeaderRows, exchange_text


def compare(group: Group | None, rows: HeaderRows, hyper: digests.HyperParameters, total: int) -> None:
    """Raise if the workers cannot have meant the same update."""
    if group is None:
        return
    if len({row.hyper for row in rows}) > 1:
        entries = [
            msgspec.json.decode(text, type=dict[str, str])
            for text in exchange_text(group, msgspec.json.encode(hyper.entries()))
        ]
        odd = digests.odd_ones_out([row.hyper for row in rows])
        raise Disagreement(
            f"hyper-parameters differ ({_names(rows, odd)}): {digests.first_difference(entries)}; build the optimizers "
            "and change their settings alike on every worker"
        )
    if len({row.sampled for row in rows}) > 1:
        odd = digests.odd_ones_out([row.sampled for row in rows])
        raise Diverged(
            f"parameters differ between workers: {_names(rows, odd)} from the others, before this step; start from the "
            "same model, and change parameters only through the optimizers or alike on every worker",
            odd,
        )
    if len({row.shares for row in rows}) > 1 or sum(row.samples for row in rows) != total:
        odd = digests.odd_ones_out([row.shares for row in rows])
        each = ", ".join(f"{rows.name_of(rank)} takes {row.samples}" for rank, row in enumerate(rows))
        raise Disagreement(
            f"workers divide this batch of {total} differently ({_names(rows, odd)} from the others): {each}; run the "
            "same version of Paceline on every worker"
        )
    with_samples = [rank for rank, row in enumerate(rows) if row.samples]
    weighted = [rank for rank in with_samples if rows[rank].flags & Flag.WEIGHTED]
    if weighted and weighted != with_samples:
        plain = [rank for rank in with_samples if rank not in weighted]
        raise Disagreement(
            f"loss_fn returned a weight on {_names(rows, weighted)}, but none on {_names(rows, plain)}; return "
            "(loss, weight) everywhere or nowhere"
        )


def total_weight(rows: HeaderRows) -> float:
    total = rows.total("weight")
    if not total > 0:
        raise StrategyError(
            "the weights of all workers sum to 0, so that there is no mean loss; leave out samples that have no "
            "weight, or make the global batch larger"
        )
    return total


def describe_nonfinite(step: int, named: tuple[tuple[int, str], ...], rows: HeaderRows) -> str:
    if not named:
        return (
            f"the sum of the gradients of step {step} over all workers overflowed, though each worker's is finite; "
            "scale the loss down or train in a wider type"
        )
    each = "; ".join(f"the gradient of {name} on {rows.name_of(rank)}" for rank, name in named)
    return f"not finite in step {step}: {each}; look at the samples of that share, or lower the learning rate"


def _names(rows: HeaderRows, ranks: list[int] | tuple[int, ...]) -> str:
    return ", ".join(rows.name_of(rank) for rank in ranks)
