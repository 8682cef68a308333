"""Bytes between two members. See ARCHITECTURE.md, "The wire", for why there is no event loop.

frame         what a frame is, pure: prefix, msgspec header, raw tensor bytes; limits before memory
connection    frames over a non-blocking socket; vectored send, receive straight into tensors
handshake     mutual challenge-response over nonces, roles and certificate fingerprints
identity      a key and a self-signed certificate for each member, pinned by fingerprint
dialing       reaching others: TCP, and a Unix socket in the abstract namespace
endpoint      being reached
calls         request and response
codes         codes that people copy, such as invitations: one line with a checksum
waiting       every wait has a deadline, and every deadline a name (`deadline`)
descriptors   everything that owns a descriptor, closed in forked children
lifeline      locks that tell the death of their holder before its descriptors do
guardian      connections that tell it to other hosts as early (`beacon`)
memory        shared memory without a name, the arena of tensors in it (`mapping`), and how a peer gets it (`handover`)
"""
