"""Training state on disk: written beside training, complete or absent, read without pickle.

tree        state as JSON and tensors
tensorfile  named tensors in the safetensors format, with a checksum
manifest    what a checkpoint says of itself
partial     folders that are not checkpoints yet, or no longer
files       write, read and find checkpoints
room        memory for many tensors at once
snapshot    copies of live tensors in memory that is used again
shelf       which checkpoints stay; the links latest and best
keeper      snapshots, the thread that writes them, publication when settled
"""

from paceline.checkpoint.errors import CheckpointError, CorruptCheckpoint, DiskFull
from paceline.checkpoint.files import Contents, find, newest_good, read, write
from paceline.checkpoint.keeper import Keeper
from paceline.checkpoint.pending import Pending, Stage

__all__ = [
    "CheckpointError",
    "Contents",
    "CorruptCheckpoint",
    "DiskFull",
    "Keeper",
    "Pending",
    "Stage",
    "find",
    "newest_good",
    "read",
    "write",
]
