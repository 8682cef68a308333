"""Whether the ranges of a run are where they should be, as its coordinator remembers it."""

from __future__ import annotations

import contextlib
import sqlite3

from paceline.control.journal.journal import DATABASE, JournalError
from paceline.control.journal.reader import RunReader
from paceline.placement.placement import Placement
from paceline.testing.chaos.stage import ChaosRun
from paceline.wire.decoding import decode


def placement_of(stage: ChaosRun) -> Placement:
    database = sqlite3.connect(f"file:{stage.folder / DATABASE}?mode=ro", uri=True, timeout=10.0)
    with contextlib.closing(database):
        row = database.execute("SELECT value FROM remembered WHERE key = 'placement'").fetchone()
    return Placement() if row is None else decode(row[0], Placement)


def is_settled(stage: ChaosRun) -> bool:
    """Every range on as many living servers as the schedule says, and none on its way."""
    try:
        placement = placement_of(stage)
        with RunReader(stage.folder) as reader:
            living = {row.member for row in reader.members() if row.is_server and not row.fate}
    except (sqlite3.Error, JournalError):
        return False
    num_backups = min(stage.schedule.replicas, stage.schedule.servers) - 1
    at_rest = (len(one.backups) == num_backups and not one.joining and not one.handing for one in placement.ranges)
    holders = placement.card_of.keys()
    return bool(placement.ranges) and all(at_rest) and holders <= living and len(living) >= stage.schedule.servers


def is_held_without(stage: ChaosRun, host: int) -> bool:
    """Whether servers of other hosts have all of every range."""
    try:
        placement = placement_of(stage)
    except sqlite3.Error:
        return False
    address = stage.lab[host].address
    others = {card.member for card in placement.cards if card.address[0] != address}
    holders = ({one.primary.server, *(backup.server for backup in one.backups)} for one in placement.ranges)
    return bool(placement.ranges) and all(servers & others for servers in holders)
