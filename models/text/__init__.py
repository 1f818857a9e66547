"""Models of text, one family in a file."""
