"""Which samples make up a step, and how they become batches.

    order.py      the order of an epoch: a pure function of (seed, epoch, length)
    cursor.py     how far an epoch has been committed
    split.py      how a global batch is divided among ranks
    loader.py     batches for one worker, collated ahead of time
    ├── window.py     which batches are requested ahead, and which answers are stale
    ├── pool.py       loader workers: started, watched, ended
    ├── collating.py  how a request becomes a batch
    ├── at_once.py    batches that need not be read sample by sample
    └── seeding.py    the random numbers under which a sample is fetched
    dataset.py    what counts as a dataset, and its fingerprint

Consequence of the first three: which samples make up step t does not depend on who is there.
"""
