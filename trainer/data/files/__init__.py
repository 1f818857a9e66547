"""Data in folders: the list of files, their conversion to rows, and reading ahead by threads."""
