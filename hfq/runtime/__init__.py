"""Functions for a loaded model: report, timeline, batches."""
