"""How the process of a session becomes a member: of the run that started it, or of a run of one."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import paceline
from paceline.checkpoint.weights import plain_name
from paceline.control.machines.member import Member
from paceline.control.messages.members import Introduction
from paceline.control.shell import ticket as tickets
from paceline.control.shell.client import MemberClient, way_to_custody
from paceline.control.shell.ticket import Ticket
from paceline.custody import names
from paceline.custody.depot import Depot
from paceline.engine.speeds import PROBE_VARIABLE
from paceline.train import warming
from paceline.train.groups import Groups
from paceline.train.halting import patience_of
from paceline.train.membership import Client, Ledger, Membership
from paceline.train.solo import Solo, own_card
from paceline.train.watchdog import Watchdog
from paceline.wire.card import Card
from paceline.wire.endpoint import Endpoint
from paceline.wire.handshake import Credentials
from paceline.wire.identity import Identity, new_member_id
from paceline.wire.reaching import own_address

logger = logging.getLogger("paceline.train")


class Joined(NamedTuple):
    """What there is when a process belongs to a run."""

    run: str
    member: str
    card: Card
    agent: str
    client: Client
    groups: Groups
    membership: Membership
    endpoint: Endpoint | None
    watchdog: Watchdog | None

    def close(self, flush_s: float) -> None:
        if self.watchdog is not None:
            self.watchdog.close()
        self.membership.close()
        self.groups.close()
        self.client.close(flush_s)
        if self.endpoint is not None:
            self.endpoint.close()


_joined_run = ""  # of which this process is, or was, a worker
_unused: Ticket | None = None  # taken by a session that may not come to be


def find_ticket() -> Ticket | None:
    """That of the run which started this process. A process is a worker of it once: of the first session that came to
    be (`occupy`)."""
    global _unused
    _unused = ticket = _unused or tickets.inherited()
    if ticket is None and _joined_run:
        raise RuntimeError(
            f"this process has a session of the run {_joined_run} already, and another one would train alone on every "
            "worker; train several models in one session, or run one script after the other"
        )
    return ticket


def occupy(ticket: Ticket | None) -> None:
    """There is a session with this ticket now; one whose constructor raised leaves it to the next."""
    global _joined_run, _unused
    _unused = None
    if ticket is not None:
        _joined_run = ticket.run


def training_of(ticket: Ticket | None) -> str:
    """An id of this training: the same for all workers of a run, and for those that it starts again."""
    secret = ticket.secret if ticket is not None else secrets.token_bytes(32)
    return hashlib.sha256(b"paceline training " + secret).hexdigest()[:32]


def depot_of(ticket: Ticket | None, identity: Identity) -> Depot | None:
    """The way to the run's own folder, where that is not this worker's."""
    if ticket is None or not ticket.guest:
        return None
    return Depot(way_to_custody(ticket, Credentials(identity, ticket.secret, "worker")))


def join(
    ticket: Ticket | None, identity: Identity, base: int, ledger: Ledger, on_orphaned: Callable[[], None]
) -> Joined:
    """Connect to the run, or make one."""
    if ticket is None:
        return _alone(base, ledger)
    credentials = Credentials(identity, ticket.secret, "worker")
    endpoint = Endpoint(credentials, host=own_address(ticket.host, ticket.address), tls=ticket.tls)
    machine = Member(identity.member)
    membership = Membership(machine, ticket.run)
    membership.patience_s = patience_of(ticket)
    client = MemberClient(
        ticket, machine, credentials, membership.act, on_orphaned=on_orphaned, orphan_s=patience_of(ticket)
    )
    groups = Groups(ticket.run, identity.member, endpoint, client.post)
    membership.connect(client, groups, ledger)
    watchdog = Watchdog(membership.standing)
    card = Card.of(endpoint)
    return Joined(ticket.run, identity.member, card, ticket.agent, client, groups, membership, endpoint, watchdog)


def _alone(base: int, ledger: Ledger) -> Joined:
    member = new_member_id()
    machine = Member(member)
    membership = Membership(machine, "alone")
    card = own_card(member)
    client = Solo(machine, card, base, membership.act)
    groups = Groups("alone", member, None, client.post)
    membership.connect(client, groups, ledger)
    return Joined("alone", member, card, "", client, groups, membership, None, None)


def introduce(
    joined: Joined,
    facts: Mapping[str, str],
    model: nn.Module,
    capacity: float,
    ranges: tuple[int, ...],
    *,
    leased: bool,
) -> Introduction:
    """Who this worker is, how fast it may be, what must be alike on all, and what it needs servers to hold."""
    parameters = tuple(
        f"{plain_name(name)} {str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"
        for name, parameter in model.named_parameters()
    )
    if os.environ.get(PROBE_VARIABLE) and warming.tried_pace() is None:
        logger.warning("--capacity probe has no effect: call paceline.warm_up(model, loss_fn, data) before the session")
    versions = {"the version of torch": str(torch.__version__), "the version of Paceline": paceline.__version__}
    return Introduction(
        card=joined.card,
        pid=os.getpid(),
        host=platform.node(),
        agent=joined.agent,
        facts={**versions, **facts},
        parameters=parameters,
        capacity=capacity,
        tried=warming.tried_pace(),
        ranges=ranges,
        leased=leased,
        slot=int(slot) if (slot := os.environ.get("LOCAL_RANK", "")).isdecimal() else 0,
    )


def folder_of(ticket: Ticket | None) -> Path | None:
    return Path(ticket.folder) / names.FOLDER if ticket is not None else None
