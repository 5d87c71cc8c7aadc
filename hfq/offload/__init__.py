"""Brings offloaded blocks to the device they compute on, for as long as they compute."""
