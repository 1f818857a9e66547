"""A clock for tests of measured times and their texts."""


class StandingClock:
    """Takes the place of the module `time`, and stands still until told otherwise.

    Attributes:
      now: the seconds that it shows.
    """

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    monotonic = perf_counter
