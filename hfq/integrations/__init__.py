"""Access to internals of transformers, accelerate, DeepSpeed, and similar libraries."""
