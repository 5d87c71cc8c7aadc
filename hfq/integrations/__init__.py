"""The only place that touches the internals of transformers, accelerate, DeepSpeed and their like."""
