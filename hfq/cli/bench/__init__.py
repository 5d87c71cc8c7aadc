"""`hfq bench`."""
