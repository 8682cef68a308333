"""The pure machines: who is in the run, who is lost, what counts. No socket, clock or thread."""
