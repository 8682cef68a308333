"""What goes wrong between a worker and the servers.

ServerError            (a PacelineError)
├── RequestRefused     a server could not do what was asked: a gradient that is not finite, no memory; nothing changed
├── Unserved           ranges that no server has served for too long
└── HalfMade           (within a server) an update that could not be finished: the server must end
Superseded             (a GroupError) the generation of a push is over: its step is done again
"""

from __future__ import annotations

from paceline.errors import GroupError, PacelineError


class ServerError(PacelineError):
    """The server group cannot do what is asked of it."""


class RequestRefused(ServerError):
    """A server refused a request; it says why. Nothing was changed by it."""


class Unserved(ServerError):
    """Some ranges were served by nobody within the time allowed."""


class HalfMade(ServerError):
    """An update was begun and could not be finished: nobody may see the range as it is here."""


class Superseded(GroupError):
    """A push of a generation that is over."""
