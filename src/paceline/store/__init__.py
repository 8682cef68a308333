"""A table where the processes of a run find each other: keys and values, counters, and waiting for keys.

It is what torch calls a store, without torch: served by an agent, or by any process, to those who hold its invitation.
`torch_store` and `env_handler`, which are not imported here, show it to torch.
"""

from paceline.store.client import StoreClient
from paceline.store.service import StoreInvitation, StoreServer

__all__ = ["StoreClient", "StoreInvitation", "StoreServer"]
