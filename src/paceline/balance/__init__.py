"""Shares: how much of each global batch every worker takes, so that all finish at the same time.

    minimum      the fewest samples of a worker
    division     samples among workers whose pace is known
    estimate     the pace of one worker, from the times of its steps
    balance      the state of all of it, and when to divide anew

All of it is pure, and none of it is decided in one place: a row of each worker's measurements is in the header of every
step, all workers see all rows, and each computes the same shares for the next step. So a change needs no message, no
new group and no coordinator, and a worker that slows down is relieved as soon as three of its steps have shown it.
"""

from paceline.balance.balance import Balance, Shares, StepTiming
from paceline.balance.division import Pace, divide
from paceline.balance.minimum import Minimum

__all__ = ["Balance", "Minimum", "Pace", "Shares", "StepTiming", "divide"]
