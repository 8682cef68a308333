"""The parameter server group."""
