"""The two loops of a session: steps that all workers do together, and leases that each does by itself."""
