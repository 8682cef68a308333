"""A server as a member of its run: the service, and the machine that follows the coordinator."""

from __future__ import annotations

import logging
import os
import platform
import threading
from typing import Any

import torch

import paceline
from paceline.control.exit_codes import FAILED, HALTED
from paceline.control.machines import lost_head
from paceline.control.machines.member_events import AdoptPlacement, Exit, Fail, Leave, MemberReady
from paceline.control.machines.server_member import ServerMember, ServingChanged
from paceline.control.messages.members import Introduction, Verdict
from paceline.control.shell.client import MemberClient
from paceline.control.shell.ticket import Ticket
from paceline.server.service import ServerService
from paceline.wire.card import Card
from paceline.wire.endpoint import Endpoint
from paceline.wire.handshake import Credentials
from paceline.wire.identity import Identity
from paceline.wire.reaching import own_address

logger = logging.getLogger("paceline.server")


class ServerProcess:
    def __init__(self, ticket: Ticket) -> None:
        identity = Identity()
        credentials = Credentials(identity, ticket.secret, "server")
        self.verdict: Exit | None = None
        self._is_guest = ticket.guest
        self._has_halted = False
        self._decided = threading.Event()
        self._endpoint = Endpoint(credentials, host=own_address(ticket.host, ticket.address), tls=ticket.tls)
        self._service = ServerService(self._endpoint, self.tell, self._failed)
        self._client: MemberClient[ServerMember] | None = None
        self._client = MemberClient(
            ticket, ServerMember(identity.member), credentials, self._act, on_orphaned=self._orphaned
        )
        versions = {"the version of torch": str(torch.__version__), "the version of Paceline": paceline.__version__}
        self._client.post(
            MemberReady(
                Introduction(
                    card=Card.of(self._endpoint),
                    pid=os.getpid(),
                    host=platform.node(),
                    agent=ticket.agent,
                    facts=versions,
                    capacity=ticket.capacity,
                ),
                0,
            )
        )

    def _act(self, action: Any) -> None:
        if isinstance(action, AdoptPlacement):
            self._service.adopt(action.placement)
        elif isinstance(action, Exit):
            self.verdict = action
            self._decided.set()

    def _failed(self, cause: str) -> None:
        if self._client is not None:
            self._client.post(Fail(cause))
        self.verdict = Exit(Verdict.FAILED, cause)
        self._decided.set()

    def _orphaned(self) -> None:
        self.verdict = Exit(Verdict.EVICTED, "the coordinator is gone")
        self._decided.set()

    def tell(self) -> None:
        """Say how far this server is."""
        if self._client is not None:
            self._client.post(ServingChanged(self._service.serving()))

    def check_deserted(self) -> None:
        """End if the host of the run is lost, and whoever needed this server is gone too."""
        if not self._is_guest or self._client is None or self.verdict is not None:
            return
        unheard_s, alone_s = self._client.unheard_s(), self._service.alone_s()
        if lost_head.is_deserted(unheard_s, alone_s):
            self._has_halted = True
            self.verdict = Exit(
                Verdict.EVICTED,
                f"the coordinator has not been heard of for {unheard_s:.0f} s, and no worker is there",
            )
            self._decided.set()

    def leave(self) -> None:
        if self._client is not None:
            self._client.post(Leave())

    def wait(self, seconds: float) -> bool:
        """Whether it is decided, within this time, how this server ends."""
        return self._decided.wait(seconds)

    def exit_code(self) -> int:
        assert self.verdict is not None
        logger.info("this server ends: %s", self.verdict.reason)
        if self._has_halted:
            return HALTED
        return 0 if self.verdict.verdict is Verdict.RELEASED else FAILED

    def close(self) -> None:
        self._service.close()
        if self._client is not None:
            self._client.close(flush_s=2.0)
        self._endpoint.close()
