"""`paceline bench shares`: unequal workers of one machine, with and without shares that follow their speed.

plan        what is measured
trainers    what each worker does
measure     workers of unequal speed, one contender after the other
report      tables and the JSON record
"""
