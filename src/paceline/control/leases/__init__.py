"""Who does which samples, where there is no global step: leases, handed out by the coordinator.

A lease is a numbered part of an epoch, done by one worker. A worker holds a few ahead, so that it never waits for the
coordinator. Who is idle gets the next one; when none are left, it gets one that a slower worker holds and has not
started. The leases of a dead worker are handed out again.

Nothing depends on a lease being held by one worker only: each range of the parameters counts a lease once, whoever
brings it. So a dispatcher that has forgotten everything, or all but `prefix` (below which all leases are known to be
done), learns the rest from what the workers say, and what it does not learn is done again and counts once.

Both sides are pure: `LeaseDispatcher` is the coordinator's, `LeaseHolder` the worker's.
"""
