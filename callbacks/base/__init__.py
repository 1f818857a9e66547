"""What callbacks are made of: the hooks, logs that are read late, lazy logs, monitors, and the `Run` they act on."""
