"""All-reduce on one host against Gloo, Open MPI and Intel MPI: `paceline bench allreduce` with more libraries.

peers.py      which of them this machine has, and how their processes are started
mpi.py        MPI as a driver of that command
benchmark.py  options, tables, picture, targets
"""
