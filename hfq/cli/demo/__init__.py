"""`hfq demo`."""
