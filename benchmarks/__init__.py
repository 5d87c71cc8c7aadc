"""What loading and streaming cost, measured against the machine's own limits and against other tools in the same run."""
