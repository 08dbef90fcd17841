"""Every number of this folder that is set by hand: neither measured nor in the YAML.

Used as `thresholds.SURE`. Each line below a number: its unit, what it means, where it comes from."""

LEAST_SAMPLES = 3
"""Timed steps. An interval with fewer says nothing: three values are the fewest that have quartiles."""

SAMPLED_APART, SAMPLES_OF_INTERVAL = 20, 5
"""Steps from one timed step to the next right after a change, and timed steps of an interval at least. A timed step
takes about 0.2 of a step more than others."""

CHANGED = 2.0
"""Standard deviations by which a timed step lies above what is usual if it shows a change."""

SAMPLES_OF_CHANGE, SAMPLES_OF_USUAL = 4, 48
"""Timed steps in a row that show a change and are decided on, and the newest that tell what is usual: several moments
of a machine that others share."""

LONG_INTERVAL, MANY_INTERVALS = 1000, 20
"""Steps, and intervals of a job. An epoch that is longer than so many steps, and than such a part of a job, is decided
on in parts."""

USUAL_SCATTER = 0.02
"""Part of the step. How far steps of one plan differ in what balance would save, until more is known."""

SURE = 0.95
"""Probability with which a move must gain."""

MEMORY = 6
"""Intervals for which a move asks of the next that it surely saves `min_gain`, and for which a refused plan is not
asked for again; number of left plans that stay candidates."""

LOOK_SHARE = 0.05
"""Part of the seconds at stake, which balance would save, that a look, and the search in it, may take."""

MOVE_BYTES_PER_SECOND, MOVE_SECONDS = 4e8, 0.02
"""Bytes/s and seconds. What a move takes until the first was made; then it is measured."""

MEMORY_SHARE = 0.9
"""Part of a rank's free memory that tables may take at the start; the rest is for activations and the system."""
