"""Functions that multiply by packed weights, and the table that says which one runs."""
