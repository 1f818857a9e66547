"""Streams with states, in the forms of the libraries that have them."""

import numpy as np


class LikeLoader:
    """Like torchdata's `StatefulDataLoader`: a generator orders each pass, and a state is for the next iterator.

    Args:
      batches: number of batches of a pass.
      seed: of the generator.
    """

    made = 0  # batches, by all

    def __init__(self, batches=7, seed=0):
        self.batches = batches
        self.generator, self.iterator, self.loaded = np.random.default_rng(seed), None, None

    def __iter__(self):
        self.iterator = _LoaderIterator(self, self.loaded)
        self.loaded = None
        if self.iterator.is_over:
            self.iterator = _LoaderIterator(self, None)
        return self.iterator

    def batch(self, number):
        type(self).made += 1
        return np.full((2, 3), number, np.float32)

    def state_dict(self):
        return self.iterator.state()

    def load_state_dict(self, state):
        self.iterator, self.loaded = None, state


class _LoaderIterator:
    def __init__(self, loader, state):
        self.loader = loader
        if state is not None:
            loader.generator.bit_generator.state = state["generator"]
        self.generator = loader.generator.bit_generator.state
        self.order = loader.generator.permutation(loader.batches)
        self.given, self.is_over = (0, False) if state is None else (int(state["given"]), state["is_over"])

    def __iter__(self):
        return self

    def __next__(self):
        if self.given == self.loader.batches:
            self.is_over = True
            raise StopIteration
        self.given += 1
        return self.loader.batch(self.order[self.given - 1])

    def state(self):
        return {"generator": self.generator, "given": np.array(self.given), "is_over": self.is_over}
