"""CODE: who gets in with it, and what it says to who does not."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from paceline.control.shell import invitation
from paceline.control.shell.client import command
from paceline.control.shell.invitation import FORGOTTEN_S, Code, Door, Invited, enter
from paceline.control.shell.ticket import Ticket
from paceline.errors import AddressError, CallFailed, HandshakeRefused
from paceline.wire.deadline import Deadline
from paceline.wire.identity import Identity
from tests.control.helpers import new_config, serving, training


def soon() -> Deadline:
    return Deadline(20.0, "a test")


class House:
    """A door whose clock and memory are at hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.memory: dict[str, bytes] = {}
        self.identity = Identity()
        self.ticket = Ticket(
            run="a run",
            folder="/run",
            address=("127.0.0.1", 1),
            local_name="",
            host="",
            secret=b"the run's secret",
            fingerprint=self.identity.fingerprint,
            tls=False,
        )
        self.door = self.new_door()

    def new_door(self) -> Door:
        return Door(
            self.ticket,
            self.identity,
            host="127.0.0.1",
            advertised="127.0.0.1",
            remember=self.remember,
            remembered=dict(self.memory),
            clock=lambda: self.now,
        )

    def remember(self, changes: Mapping[str, bytes | None]) -> None:
        for key, value in changes.items():
            if value is None:
                del self.memory[key]
            else:
                self.memory[key] = value

    def __enter__(self) -> House:
        return self

    def __exit__(self, *_: object) -> None:
        self.door.close()


def test_a_code_leads_to_the_ticket_but_does_not_hold_it() -> None:
    with House() as house:
        invited = house.door.invite(60.0, 5)
        assert enter(f"  {invited.code}\n", deadline=soon()) == house.ticket
        assert "\n" not in invited.code
        assert invited.local_only
        body = base64.urlsafe_b64decode(invited.code.removeprefix(Code.PREFIX) + "==")
        assert house.ticket.secret not in body
        token = Code.decode(invited.code).token
        assert not any(token in value for value in house.memory.values())


def test_a_code_expires() -> None:
    with House() as house:
        code = house.door.invite(60.0, 5).code
        house.now += 61.0
        with pytest.raises(HandshakeRefused, match=r"expired 1 s ago; ask for a new one"):
            enter(code, deadline=soon())


def test_a_code_is_used_up() -> None:
    with House() as house:
        code = house.door.invite(60.0, 2).code
        for _ in range(2):
            enter(code, deadline=soon())
        with pytest.raises(HandshakeRefused, match=r"used up; ask for a new one"):
            enter(code, deadline=soon())


def test_codes_survive_the_coordinator() -> None:
    with House() as house:
        code = house.door.invite(60.0, 2).code
        enter(code, deadline=soon())
        house.door.close()
        house.door = house.new_door()
        enter(code, deadline=soon())
        with pytest.raises(HandshakeRefused, match="used up"):
            enter(code, deadline=soon())


def test_a_guessed_token_is_not_known() -> None:
    with House() as house:
        code = Code.decode(house.door.invite(60.0, 2).code)
        for changed in (
            msgspec.structs.replace(code, token=b"\0" * 16),
            msgspec.structs.replace(code, token_id="0" * 16),
        ):
            with pytest.raises(HandshakeRefused, match="does not know this invitation"):
                enter(changed.encode(), deadline=soon())
        for changed in (
            msgspec.structs.replace(code, secret=b"\0" * 32),
            msgspec.structs.replace(code, fingerprint=b"\0" * 32),
        ):
            with pytest.raises(HandshakeRefused, match="another run answers at the address"):
                enter(changed.encode(), deadline=soon())


def test_what_is_no_code_or_was_cut_is_told_apart() -> None:
    with House() as house:
        code = house.door.invite(60.0, 2).code
    with pytest.raises(ValueError, match="does not start with paceline-join1:"):
        Code.decode(code[5:])
    for cut in (code[:-1], code[:-10], Code.PREFIX, code[:40] + code[41:], code[:60] + "!" + code[61:]):
        with pytest.raises(ValueError, match="cut or changed"):
            Code.decode(cut)


def test_a_code_of_a_run_that_is_gone_says_so() -> None:
    with House() as house:
        code = house.door.invite(60.0, 2).code
    with pytest.raises(AddressError, match=r"leads to nobody.*it has expired"):  # by this machine's clock
        enter(code, deadline=soon())


def test_a_door_that_is_being_opened_again_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator died, and is started again at the same address."""
    with House() as house:
        house.now = time.time()
        code = house.door.invite(60.0, 1).code
        house.door.close()
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 2:
                house.door = house.new_door()

        monkeypatch.setattr("paceline.control.shell.invitation.time.sleep", pause)
        assert enter(code, deadline=soon()) == house.ticket
        assert len(pauses) == 2


def test_a_door_that_stays_shut_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invitation, "NOBODY_S", 0.3)
    with House() as house:
        house.now = time.time()
        code = house.door.invite(60.0, 1).code
    with pytest.raises(AddressError, match=r"leads to nobody.*is the run still going on.*--listen ADDRESS"):
        enter(code, deadline=soon())


def test_long_expired_ones_are_forgotten() -> None:
    with House() as house:
        house.door.invite(60.0, 2)
        house.now += FORGOTTEN_S + 61.0
        house.door.invite(60.0, 2)
        assert sum(key.startswith("invitation/") for key in house.memory) == 1


@pytest.mark.parametrize(("valid_s", "uses"), [(0.0, 1), (-5.0, 1), (float("nan"), 1), (1e9, 1), (60.0, 0)])
def test_what_nobody_could_use_is_refused(valid_s: float, uses: int) -> None:
    with House() as house, pytest.raises(ValueError, match=r"give"):
        house.door.invite(valid_s, uses)


def test_who_is_invited_joins_the_run(tmp_path: Path) -> None:
    config = new_config(tmp_path)
    with serving(config) as running:
        invited = command(running.ticket, "invite", (60.0, 1), answer_type=Invited, deadline=soon())
        with pytest.raises(CallFailed, match="valid_s"):
            command(running.ticket, "invite", (0.0, 1), answer_type=Invited, deadline=soon())
    with serving(config) as running:  # a restart in between
        ticket = enter(invited.code, deadline=soon())
        assert ticket == running.ticket
        with training(ticket, 1, num_steps=3) as (trainee,):
            assert trainee.exited.wait(20.0)
        running.join()
