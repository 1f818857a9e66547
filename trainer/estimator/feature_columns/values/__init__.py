"""What feature columns read on the host: arrays of numbers and strings, checked, and their fingerprints.

Owns no column, and nothing of the device.
"""
