"""`hfq doctor`."""
