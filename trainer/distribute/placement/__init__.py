"""Where data lie: devices, groups of batches on them, arrays kept there from one run to the next."""
