"""Offloading with prefetch: units of weights are onloaded while they compute."""
