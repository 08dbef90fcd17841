"""Every number by which resharding decides that is neither measured nor set in the YAML: this is the whole list.

Used as `thresholds.SEARCHES`. Each line below a number: its unit, what it means, what it was derived from.
"""

LEAST_SAMPLES = 3
"""Timed steps. An interval with fewer says nothing: three values are the fewest that have quartiles."""

USUAL_SCATTER = 0.02
"""Part of the step. How far two intervals of one plan differ, until more is known: one observation among those that
are made (the median counts). From `bench loop-steady`: two epochs of one plan differ by 1 to 4%."""

SURE = 1.64
"""Standard deviations. By so many a gain must exceed min_gain, and by so many times the usual scatter must measured
costs differ to have changed: of normal errors one in twenty is larger. With one standard deviation simulated jobs in
which nothing changes made moves that gained nothing."""

RANK_CHANGED = 1.25
"""Ratio. A rank that has become slower than another by so much has changed by itself, and no move is blamed for it.
More than any placement does to a rank's slowness, less than what half a core taken away does (1.5 to 2)."""

MEMORY = 6
"""Intervals. How long moves ask for more caution, and twice as many differences between intervals are kept: of these
the median has a standard error of 20%."""

SEARCHES = 3
"""In a row that found nothing; then the next waits until something changes. Intervals alike are averaged, so the
third knows what is to be known: a fourth would find less than 1 / sqrt(3) - 1 / sqrt(4) of the noise, 8%, gone."""

SEARCH_SHARE = 0.05
"""Of the seconds that perfect balance would save: what a search (learning and planning) may take. A search that finds
half of what there is to find has paid for itself tenfold."""

LEAST_SEARCH_SECONDS = 0.03
"""Seconds. With less no search is made: 24 tables on 2 ranks take so long."""

MOVE_BYTES_PER_SECOND, MOVE_SECONDS = 0.5e9, 0.1
"""Bytes/s and seconds. What a move takes until the first was made: half of what gloo moves on one machine
(`bench reshard-speed`), and what agreeing and building new lookups take there."""

MOST_WEIGHED = 40
"""Tables or groups of them. So many are weighed against each other for a part of a large move: some 2,000 predictions
of 50 microseconds."""

MEMORY_SHARE = 0.9
"""Of a rank's free memory. What tables may take of it at the start; the rest is for activations and the system."""
