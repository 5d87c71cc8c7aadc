"""hfq's version, which every layer may name."""

__version__ = "0.2.0"
