"""Bases of callbacks: the hooks, logs that are read late, lazy logs, monitors, and the `Run` they act on."""
