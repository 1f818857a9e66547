"""Files from URLs, verified before use; archives that cannot leave their folder; pickled plain data."""
