"""Sockets, threads and processes around the machines."""
