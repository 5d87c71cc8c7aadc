"""`hfq plan`."""
