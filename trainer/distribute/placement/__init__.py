"""Placement of data: devices, groups of batches on them, and arrays that stay there between runs."""
