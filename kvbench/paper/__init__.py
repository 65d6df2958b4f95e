"""What the PagedAttention paper plots and says, and how a run's numbers are held against it."""
