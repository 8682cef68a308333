"""Bytes between two members: frames, handshake, TLS, shared memory, deadlines. See ARCHITECTURE.md, "The wire"."""
