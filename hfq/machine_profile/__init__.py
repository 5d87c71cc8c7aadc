"""Measured rates of one machine, for the predictions of `hfq plan`, `hfq doctor`, and reports."""
