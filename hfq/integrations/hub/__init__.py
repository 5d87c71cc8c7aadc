"""Headers of checkpoints on the Hugging Face Hub."""
