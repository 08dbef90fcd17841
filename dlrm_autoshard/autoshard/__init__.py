"""The initial plan, and after each interval of training the decision whether tables move.

In: a planner and what was measured. Out: a `Decision`. Only `initial_plan`, `intervals`, `resharding` and
`autoshard` talk to the ranks.
"""
