"""Raw features on the host: checked arrays of numbers and strings.

Does not depend on columns or devices.
"""
