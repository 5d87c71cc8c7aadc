"""`python -m benchmarks.gpu`: nine measurements of hfq on one accelerator, in at most nine minutes.

Each part runs in its own process with its own time limit. `--dry-run` runs the same code with small sizes on a
simulated accelerator: a check, not a measurement.
"""
