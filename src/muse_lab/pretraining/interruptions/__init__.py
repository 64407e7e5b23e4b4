"""Ways in which a run ends early.

`stopping.py`: on request, by signals and time limits. `failures.py`: by an error, and again at the same step.
`watchdog.py`: because it stands still.
"""
