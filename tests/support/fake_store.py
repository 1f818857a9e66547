"""JAX's key-value store, as far as the trainer needs it, in one process."""

from __future__ import annotations


class FakeStore:
    """Holds values."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_dir_get(self, key):
        return [(name, value) for name, value in self.values.items() if name.startswith(key)]
