"""Folder that `hfq launch` puts on PYTHONPATH."""
