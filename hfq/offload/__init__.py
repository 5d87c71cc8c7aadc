"""Offloading with prefetch: onloads units of weights to their execution device while they compute."""
