"""What a coordinator is started with, and how it is started.

The agent makes a `Config` once and keeps it: a coordinator that is started again with it and with the same folder is
the same one to its members.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from paceline.control.machines.coordinator_events import RunSettings
from paceline.control.shell import ticket as tickets
from paceline.wire.dialing import is_loopback
from paceline.wire.identity import Identity

VARIABLE = "PACELINE_COORDINATOR_FD"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What a coordinator needs to be the same one when it is started again; keep it as secret as the run's secret.
    Made by `Config.new`. `parent` is the process that it must not outlive, 0 for none; `is_again` says that it is not
    the first one of this run, and `last_port` where the one before listened, for one that has forgotten it. `resumed`:
    the run was gone on with by `--resume`."""

    run: str
    folder: str
    settings: RunSettings
    host: str
    advertised: str
    port: int
    tls: bool
    secret: bytes
    member: str
    pem: bytes
    local_name: str
    parent: int = 0
    is_again: bool = False
    last_port: int = 0
    resumed: bool = False

    @classmethod
    def new(
        cls,
        *,
        run: str,
        folder: Path,
        settings: RunSettings,
        host: str = "127.0.0.1",
        advertised: str = "",
        port: int = 0,
        tls: bool | None = None,
        parent: int = 0,
        resumed: bool = False,
    ) -> Config:
        """TLS is on unless `host` is a loopback address. `advertised` is how others call this host, `port` 0 lets the
        system choose at the first start."""
        if host in ("0.0.0.0", "::", "") and not advertised:
            raise ValueError(f"host={host!r} is every address of this machine; say by `advertised` which others use")
        identity = Identity()
        return cls(
            run=run,
            folder=str(folder),
            settings=settings,
            host=host,
            advertised=advertised or host,
            port=port,
            tls=not is_loopback(host) if tls is None else tls,
            secret=secrets.token_bytes(32),
            member=identity.member,
            pem=identity.to_pem(),
            local_name=f"paceline-{secrets.token_hex(16)}",
            parent=parent,
            resumed=resumed,
        )

    def __repr__(self) -> str:
        return f"Config(run={self.run!r}, folder={self.folder!r}, host={self.host!r})"


def launch(config: Config, **options: Any) -> subprocess.Popen[bytes]:
    """Start a coordinator as a child of this process; `options` go to `Popen`."""
    config = msgspec.structs.replace(config, parent=os.getpid())
    descriptor = tickets.hand_over(config)
    try:
        command = [sys.executable, "-m", "paceline.control.shell.service"]
        environment = tickets.environment_for(descriptor, VARIABLE)
        return subprocess.Popen(command, env=environment, pass_fds=[descriptor], **options)
    finally:
        os.close(descriptor)
