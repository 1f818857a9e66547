"""Files from URLs, checked before they are used; archives that cannot leave their folder; pickled plain data."""
