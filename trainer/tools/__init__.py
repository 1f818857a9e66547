"""Tools: what is done with a run beside training, such as reports on it."""
