"""User data behind a single protocol: arrays, datasets, generators, Grain; and the definition of a batch."""
