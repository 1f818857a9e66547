"""Data that several processes read together: the assignment of rows to processes, and joint batches."""
