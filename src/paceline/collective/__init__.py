"""Collectives among members: one `Group` for each plan. See ARCHITECTURE.md, "Collectives"."""

from paceline.collective import meeting
from paceline.collective.group import Group
from paceline.collective.lane import Handle

__all__ = ["Group", "Handle", "meeting"]
