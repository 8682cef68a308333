"""Parameters and rows through servers, beside what others offer.

plan.py      what is measured
crowd.py     the processes of one contender: a server and workers that wait for the word to begin
drivers/     a file each: how a contender serves, and what its workers do in a round
measure.py   rounds over all contenders
benchmark.py options, tables, targets
"""
