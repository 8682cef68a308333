"""Who is in the run, how much each does, what counted.

Two pure machines, `Coordinator` and `Member`, decide everything; they know no socket, no clock and no thread. The
service and the client turn bytes into their events and their actions into bytes; the simulator in `testing` runs the
same two machines through thousands of fault schedules.

What they say to each other is *state*, not news: a `Report` holds all that matters of a member, a `Directive` all that
matters for it. Either may be lost, repeated or late; the newest one counts, and it is said again with every heartbeat.

How an operation becomes final
------------------------------
1. Every member of a generation takes part in the reduction of operation n. Who sees it complete has *applied* n.
2. Who sees n+1 complete knows that everybody applied n: n is *settled*, and nothing can undo it.
3. When a member is lost, the coordinator raises the *fence*. A member that reports `fenced >= f` has promised to apply
   nothing more of any generation below f. One promise is enough to end a generation, because an operation needs all.
4. When every member that lives has promised, the highest `applied` among them is the *base* of the next plan. By (1)
   nobody is behind by more than one operation; who is gets the result of that operation, not the state, because its
   loop body has yet to run for it.
5. Who joins or leaves does so at a *clean point*: just before a step, when the loop bodies have run everywhere. All
   members agree on it in the header of an earlier operation, so that no message is waited for.
"""
