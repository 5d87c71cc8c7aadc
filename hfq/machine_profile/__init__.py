"""Measured rates of one machine, which `hfq plan`, `hfq doctor`, and reports predict with."""
