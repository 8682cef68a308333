"""Who takes part in a group and where each one is reached."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from paceline.fault_points import FaultPoint
from paceline.wire.endpoint import Endpoint

THIS_HOST: FaultPoint[[], str] = FaultPoint("a process looks whether another one is on its host")


class Card(msgspec.Struct, frozen=True):
    """A member as the others of its group know it. `host` is equal for members that can share memory;
    `cores` are those it may run on."""

    member: str
    role: str
    host: str
    address: tuple[str, int]
    local_name: str
    fingerprint: bytes
    tls: bool
    cores: tuple[int, ...]

    @classmethod
    def of(cls, endpoint: Endpoint, host_label: str = "") -> Card:
        """This member's card. Members with different labels do not share memory, even on one machine."""
        mine = endpoint.credentials
        return cls(
            member=mine.identity.member,
            role=mine.role,
            host=f"{this_host()}{host_label and ' ' + host_label}",
            address=endpoint.address,
            local_name=endpoint.local_name,
            fingerprint=mine.identity.fingerprint,
            tls=endpoint.tls,
            cores=tuple(sorted(os.sched_getaffinity(0))),
        )


def this_host() -> str:
    """The same for processes of one boot of one machine in one network namespace, and for nobody else."""
    if (another := THIS_HOST.reach()) is not None:
        return another
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.stat("/proc/thread-self/ns/net").st_ino
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:16]
