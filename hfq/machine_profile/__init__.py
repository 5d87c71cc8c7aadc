"""Measured rates of one machine, for predictions and reports."""
