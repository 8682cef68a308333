"""What a person sees of a run. Everything here reads `run.db`, nothing here writes it or steers the run.

display.py    follows a run until told to stop: a live display, or plain lines
├── follower.py   looks again and again, whatever becomes of the database
├── live.py       one look as a picture for a terminal
└── lines.py      looks as lines for a log
status.py     one look, for `paceline status`: JSON or a table
audit.py      whether every sample was committed once: a pure function
history.py    losses and metrics as lists; which rows count after a rollback
look.py       what one look finds
servers.py    what there is to say of servers
names.py      what members are called
newcomers.py  processes that have not joined yet
words.py      numbers, times and names as people read them
"""
