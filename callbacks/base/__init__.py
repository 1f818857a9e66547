"""What callbacks are made of: the hooks, the calling of many as one, lazy logs, monitors, and the `Run` they act on."""
