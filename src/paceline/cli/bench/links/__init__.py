"""`paceline bench links`: latency and bandwidth each way between every two hosts, and what `auto` would choose there.

command    on the first host it prints a code and waits, with --join CODE it takes part
gathering  how the hosts find each other: a code, a room on the first host, one group of all
measure    one pair of hosts at a time, on the group's own connections
report     table, JSON, and which links are slow

Every command is a host of its own to the group, so what is measured is the network, with the TLS that training has.
"""
