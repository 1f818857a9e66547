"""JAX's key-value store, as far as the trainer needs it, in one process."""

from __future__ import annotations


class FakeStore:
    """Holds values, until `is_gone` is set; then it raises what JAX does when process 0 is gone."""

    def __init__(self):
        self.values, self.is_gone = {}, False

    def key_value_set(self, key, value, allow_overwrite=False):
        if self.is_gone:
            raise RuntimeError("UNAVAILABLE: no connection\nmore")
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_dir_get(self, key):
        return [(name, value) for name, value in self.values.items() if name.startswith(key)]
