"""`from_pretrained` of quantized checkpoints: from the meta model to the placed model."""
