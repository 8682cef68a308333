"""Training state on disk: written beside training, complete or absent, read without pickle.

tree        state as JSON and tensors
tensorfile  named tensors in the safetensors format, with a checksum
manifest    what a checkpoint says of itself
files       write and read checkpoints
weights     those of a checkpoint, into a model
room        memory for many tensors at once
snapshot    copies of live tensors in memory that is used again
stores      where a writer's checkpoints go: a folder here, or the run's host
writer      snapshots, the thread that writes them, publication when settled
"""

from paceline.checkpoint.files import Contents, newest_good, read, write
from paceline.checkpoint.pending import Pending, SaveStage
from paceline.checkpoint.weights import load_model
from paceline.checkpoint.writer import CheckpointWriter
from paceline.custody.names import find

__all__ = [
    "CheckpointWriter",
    "Contents",
    "Pending",
    "SaveStage",
    "find",
    "load_model",
    "newest_good",
    "read",
    "write",
]
