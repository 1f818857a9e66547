"""The progress bar, and how it is worded."""
