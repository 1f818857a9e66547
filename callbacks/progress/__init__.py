"""The progress bar and its texts."""
