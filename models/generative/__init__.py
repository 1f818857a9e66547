"""Models that make images, one family in a file."""
