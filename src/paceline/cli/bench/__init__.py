"""`paceline bench`: Paceline's collectives against other libraries, all in one interleaved run.

command   the options, checked before anything starts
plan      what is measured: sizes, contenders, iterations
peers     which other libraries this machine has, and how their processes are started
crew      the processes of one library and the channel to them (`messages`, `rendezvous`)
worker    what each of those processes runs, on one of the `drivers`
measure   the order of measurement, and the time of one operation
report    table, JSON and plot (`machine` describes the host)
"""
