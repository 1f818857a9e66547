"""Text models, one family per file."""
