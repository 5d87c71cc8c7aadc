"""Loading under tensor parallelism, with one slice of each layer per rank."""
