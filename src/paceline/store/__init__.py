"""A table where the processes of a run find each other: keys and values, counters, and waiting for keys.

It is what torch calls a store, without torch: served by an agent, or by any process, to those who hold its invitation.
"""

from paceline.store.client import StoreClient
from paceline.store.service import STORE_VARIABLE, StoreInvitation, StoreServer

__all__ = ["STORE_VARIABLE", "StoreClient", "StoreInvitation", "StoreServer"]
