"""What a worker trains with, put together from what the script gave."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import nn

from paceline.balance.minimum import ANY, WITH_STATISTICS
from paceline.control.shell.ticket import Ticket
from paceline.data.dataset import fingerprint
from paceline.strategy import Updater
from paceline.strategy.base import StrategyHost
from paceline.strategy.options import SessionOptions
from paceline.train import joining
from paceline.train.batches import GlobalBatches, ValidationData
from paceline.train.folder_claim import FolderClaim
from paceline.train.ledger import TrainingLedger
from paceline.train.saving import Checkpoints, Saver
from paceline.train.schedules import Schedules
from paceline.train.sharing import Sharing
from paceline.train.strategies import strategy_for
from paceline.train.training_state import Stateful, TrainingState
from paceline.wire.identity import Identity


class TrainingHost(StrategyHost, Protocol):
    """The run, as far as these parts know it."""

    @property
    def ticket(self) -> Ticket | None: ...

    @property
    def identity(self) -> Identity: ...

    def tell_death(self, text: str) -> None: ...


class TrainingParts(NamedTuple):
    """`facts` are what must be alike on all workers."""

    options: SessionOptions
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    updater: Updater
    batches: GlobalBatches
    validation: ValidationData
    sharing: Sharing
    saver: Saver
    ledger: TrainingLedger
    schedules: Schedules
    facts: dict[str, str]

    def close(self) -> None:
        self.saver.close()
        self.batches.close()
        self.validation.close()
        self.updater.close()


def assemble(
    host: TrainingHost,
    model: nn.Module,
    stateful: Sequence[Stateful],
    data: Any,
    global_batch: int,
    options: SessionOptions,
    checkpoints: Checkpoints,
) -> TrainingParts:
    optimizers, others = _told_apart(stateful)
    is_alone = host.ticket is None
    make_strategy = strategy_for(options, optimizers, host, is_alone=is_alone)
    updater = Updater(model, optimizers, options, check=host.check, make_strategy=make_strategy)
    gradients = updater.gradients
    if options.mode.is_leased and gradients.has_batch_statistics():
        raise ValueError(
            f"consistency={options.consistency!r} with batch normalisation: each worker would have running statistics "
            "of its own; use consistency='sync', or a normalisation without them (GroupNorm, LayerNorm)"
        )
    minimum = WITH_STATISTICS if gradients.needs_two_samples() else ANY
    batches = GlobalBatches(
        data,
        global_batch=global_batch,
        seed=options.seed,
        shuffle=options.shuffle,
        order=options.order,
        options=options.loader,
        min_share=minimum.fewest,
        among_all=options.batch_norm == "sync",
        on_death=host.tell_death,
    )
    saver = _saver(host, checkpoints)
    ledger = TrainingLedger(
        TrainingState(model, optimizers, others, updater.strategy.state, only_trained=checkpoints.only_trained),
        saver,
        batches.length,
        host.tell,
        sampling=batches.sampling,
        leased=options.mode.is_leased and not is_alone,
        resumes=checkpoints.resume or not is_alone,
    )
    return TrainingParts(
        options=options,
        model=model,
        optimizers=optimizers,
        updater=updater,
        batches=batches,
        validation=ValidationData(options.seed, options.loader, host.tell_death),
        sharing=Sharing(global_batch, minimum, host.tell, is_alone=is_alone),
        saver=saver,
        ledger=ledger,
        schedules=Schedules(others),
        facts=_facts(data, global_batch, options, optimizers, batches, updater),
    )


def _facts(
    data: Any,
    global_batch: int,
    options: SessionOptions,
    optimizers: Sequence[torch.optim.Optimizer],
    batches: GlobalBatches,
    updater: Updater,
) -> dict[str, str]:
    """What must be alike on all workers."""
    return {
        "dataset_length": str(batches.length),
        "the data's fingerprint": fingerprint(data, seed=options.seed)[:16],
        "global_batch": str(global_batch),
        "seed": str(options.seed),
        "the order of samples": batches.sampling.order,
        "the optimizers": ", ".join(type(one).__name__ for one in optimizers),
        "the strategy": f"{options.strategy}, {options.consistency}",
        "batch_norm": options.batch_norm,
        "the tables": str([msgspec.to_builtins(spec) for spec in updater.gradients.sparse.specs]),
    }


def _saver(host: TrainingHost, checkpoints: Checkpoints) -> Saver:
    ticket = host.ticket
    own = joining.folder_of(ticket)
    folder = Path(checkpoints.folder) if checkpoints.folder is not None else own
    resumes = checkpoints.resume or (ticket is not None and ticket.resumed)
    is_named = folder is not None and folder != own
    claim = FolderClaim(folder, joining.training_of(ticket), resumes=resumes) if folder and is_named else None
    depot = joining.depot_of(ticket, host.identity)
    return Saver(checkpoints, folder, host.tell, own=own, depot=depot, claim=claim)


def _told_apart(stateful: Sequence[Stateful]) -> tuple[list[torch.optim.Optimizer], list[Stateful]]:
    """The optimizers, and what else has a state."""
    optimizers = [one for one in stateful if isinstance(one, torch.optim.Optimizer)]
    others = [one for one in stateful if not isinstance(one, torch.optim.Optimizer)]
    for one in others:
        if not isinstance(one, Stateful):
            raise TypeError(f"{type(one).__name__} has no state_dict and load_state_dict; give optimizers, schedules")
    if not optimizers:
        raise TypeError("a session needs an optimizer: Session(model, optimizer, ...)")
    return optimizers, others
