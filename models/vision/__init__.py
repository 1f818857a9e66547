"""Image models, one family per file."""
