"""Numbers that decide on changes, searches and moves, and on memory at the start; neither measured nor in the YAML.

Used as `thresholds.SURE`. Each line below a number: its unit, what it means, what it was derived from. Other numbers
(of sampling, of what is measured at the start and in mid-run) stand where they are used.
"""

LEAST_SAMPLES = 3
"""Timed steps. An interval with fewer says nothing: three values are the fewest that have quartiles."""

CHANGED = 6.0
"""Standard deviations. By so many, summed over steps beyond one each and at most two of each, must sampled steps lie
above what is usual before they end an interval: three that are three off. In five jobs of `bench race-short` with a
straggler, every second step sampled, each beginning and each end was noticed within 12 steps, and in the straggling
stretches, 750 sampled steps, three changes that were none; in 20,000 simulated steps with an error of 5% none."""

SAMPLES_OF_CHANGE = 4
"""Timed steps after a change on which it is decided, and as many more each time it has lasted twice as long; four times
as many tell what is usual. Chosen by hand: of fewer the quartiles say little; with eight, decided on once, half a core
taken for 200 steps was gone for 41 before tables moved."""

LONG_INTERVAL, MANY_INTERVALS = 1000, 20
"""Steps, and intervals of a job. An epoch that is longer than so many steps, and than such a part of a job, is decided
on in parts: a job of one epoch would else be decided on when it is over. Chosen by hand."""

USUAL_SCATTER = 0.02
"""Part of the step. How far two intervals of one plan differ, until more is known: it counts as one observation among
those that are made, of which the median is taken. Chosen by hand: two epochs of one plan differed by 3.8% in
`bench loop-steady`, on a machine with neighbours."""

SURE = 1.64
"""Standard deviations. By so many a gain must be above zero, or above what caution asks for, and by so many times their
scatter must measured costs differ to have changed: of normal errors one in twenty is larger. With one standard
deviation simulated jobs in which nothing changes made moves that gained nothing."""

MEMORY = 6
"""Intervals. How long moves ask for more caution; of twice as many the differences are kept. Chosen by hand."""

SEARCH_SHARE = 0.05
"""Of the seconds that perfect balance would save: what searches may take until one finds something, or something
changes. Chosen so that it stays cheap where nothing is found: where balance would save 4% that is 0.2% of the training
time."""

MOVE_BYTES_PER_SECOND, MOVE_SECONDS = 4e8, 0.02
"""Bytes/s and seconds. What a move takes until the first was made; then it is measured. Of 36 first moves of jobs of
`bench race-short` those of 50 MiB and more had 3 to 6e8 but for one (memory new to a process comes slowly), small ones
took 0.01 to 0.03 s. What would not save that many seconds is not searched for."""

MEMORY_SHARE = 0.9
"""Of a rank's free memory. What tables may take of it at the start; the rest is for activations and the system. Chosen
by hand."""
