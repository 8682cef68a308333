"""Where a run's checkpoints and logs are kept: in the run's own folder, on its host, whoever wrote them.

names     what checkpoints are called, and how they are found and put aside
partial   folders that are not checkpoints yet, or no longer
shelf     which checkpoints stay; the links latest and best
moving    files over a connection, a piece at a time, with their checksums
custodian the side of the run's host: takes checkpoints and logs in, gives checkpoints out
depot     the side of everybody else

Promises
- A checkpoint that is sent is complete or absent at the run's host: it is received into a partial folder there,
  compared with its checksums, synced, and gets its name by one rename. A connection that ends before leaves nothing.
- Memory: one piece on either side, however large the files are.
- Every wait has a deadline. A slow link may take as long as it takes, as long as it moves.

No torch here: the coordinator does without.
"""
