"""Detection of formats, and formats that hfq does not support."""
