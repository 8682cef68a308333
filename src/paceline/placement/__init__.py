"""Which server holds which range of the parameters: pure functions, which know no socket, clock or tensor.

ring.py        consistent hashing: for each range, the servers in the order in which they would take it
placing.py     where the ranges should be, given how heavy they are and how strong the servers
placement.py   where they are: an immutable, numbered statement, and one range's replicas in it
evolving.py    the next statement, one safe step nearer to where they should be
"""
