"""Shards and memory under DeepSpeed ZeRO."""
