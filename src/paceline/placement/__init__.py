"""Which server holds which range of the parameters: pure functions, which know no socket, clock or tensor.

ring.py        consistent hashing: for each range, the servers in the order in which they would take it
placing.py     where the ranges should be, given how heavy they are and how strong the servers
gauge.py       which servers have more to do than the others, as they measure it
relief.py      which ranges such a server gives to which other
relieving.py   both, from look to look: one move after the other
placement.py   where the ranges are: an immutable, numbered statement, and one range's replicas in it
evolving.py    the next statement, one safe step nearer to where they should be
"""
