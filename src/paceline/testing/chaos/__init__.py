"""Chaos: real runs of `paceline run` and `paceline join` under random faults, checked by a model that counts samples.

    python -m paceline.testing.chaos --minutes 10 --seed 1000      seeds 1000, 1001, ... until the time is up
    python -m paceline.testing.chaos --seed 1007 --seeds 1         one of them again
    python -m paceline.testing.chaos --schedule '...'              a schedule as a failure prints it

Pure parts
    schedule     what a schedule is, and its text
    drawing      a legal schedule from a seed
    expecting    what a schedule may cost: exit codes, losses that the docs state, seconds of outage
    oracle       what the counting model must hold, and what it does hold
    shrinking    a shorter schedule that fails too
Acting parts
    training     the script that the runs execute; the only part that needs torch at work
    stage        hosts, commands and processes of one run
    heads        what the hosts left that lost their coordinator's, and who goes on
    faults       one small function for each kind of fault
    playing      one schedule from its first process to its last
Looking parts
    copies       what the servers held at their end, bit for bit
    beats        what the workers wrote about their steps
    checks       the violations of one played schedule
    leftovers    what a run left on the machine
    summing      results of many seeds, in a file
"""
