"""`paceline bench allreduce`: Paceline's all-reduce on this host beside torch's Gloo, in one interleaved run.

command    the options, checked before anything starts
plan       what is measured: sizes, contenders, iterations
libraries  which libraries take part, and how their processes are started
crew       the processes of one library and the channel to them (`messages`, `sessions`)
worker     what each of those processes runs, on one of the `drivers`
measure    the order of measurement, and the time of one operation
report     table and JSON

Other libraries take part by a `BenchLibrary` and a driver of their own: benchmarks/allreduce adds MPI so.
"""
