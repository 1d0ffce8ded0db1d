"""`python -m engine.doctor`: does this machine have what a run needs, and a report to paste into an issue."""
