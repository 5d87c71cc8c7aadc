"""Headers and downloads of checkpoints on the Hugging Face Hub."""
