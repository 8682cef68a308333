"""The parameter server group. See ARCHITECTURE.md, "Servers".

keeper        which change counts, once, and who must have it: pure
service       a server's shell: letters, threads, replicas; `member` is its side of membership
store         the tensors of a server: `dense` ranges and `tables`
rows          a sparse table; `index`, `memory`, `ages`, `admission` and `row_optimizers` are its parts
layout        how parameters are cut into ranges
client        a worker's way to the group; `errand` is one request on its way
post          letters between two processes; `messages` and `parcels` say what is in them
metering      what the ranges of a server cost it
"""
