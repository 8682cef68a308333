"""Unequal workers of one machine, with and without shares that follow their speed.

plan.py      what is measured
trainers.py  what each worker does
measure.py   workers of unequal speed, one contender after the other
benchmark.py options, tables, targets
"""
