"""Benchmarks of hfq against the limits of this machine and against other tools.

Run them from a checkout: `python -m benchmarks load --out docs/benchmarks`.
"""
