"""Data in folders: which files there are, how each becomes a row, and how rows are read ahead by threads."""
