"""Errors within the server group, which no script sees.

HalfMade      (a ServerError) an update that could not be finished: the server must end
Superseded    (a GroupError) the generation of a push is over: its step is done again
"""

from __future__ import annotations

from paceline.errors import GroupError, ServerError


class HalfMade(ServerError):
    """An update was begun and could not be finished: nobody may see the range as it is here."""


class Superseded(GroupError):
    """A push of a generation that is over."""
