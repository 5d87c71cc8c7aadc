"""`hfq launch`, `hfq serve`, and `hfq chat`: programs with hfq enabled."""
