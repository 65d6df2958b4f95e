"""What executes a batch, or prices it."""
