"""Raw features on the host: checked arrays of numbers and strings, and their fingerprints.

Does not depend on columns or devices.
"""
