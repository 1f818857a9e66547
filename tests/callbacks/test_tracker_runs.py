"""The life of a tracker's run: which run gets a value or a file, and who ends it."""

import pytest

from trainer.callbacks.loggers import Tracker


class Records(Tracker):
    """Keeps runs as lists of what they got."""

    def __init__(self, run=None):
        super().__init__(run)
        self.runs = {}

    def _open(self, name):
        name = name or f"run {len(self.runs)}"
        self.runs.setdefault(name, []).append("open")
        return name

    def _id_of(self, run):
        return run

    def _send_metrics(self, run, metrics, step):
        self.runs.setdefault(run, []).append(step)

    def _send_params(self, run, params):
        self.runs.setdefault(run, []).append("params")

    def _send_artifact(self, run, path, name):
        if name == "unreadable":
            raise OSError(name)
        self.runs.setdefault(run, []).append(name)

    def _close(self, run, failed):
        self.runs[run].append("failed" if failed else "closed")


@pytest.mark.parametrize(("failed", "end"), [(False, "closed"), (True, "failed")])
def test_a_file_after_the_end_goes_to_the_ended_run_which_ends_again_in_the_same_way(failed, end):
    logger = Records()
    logger.log_params({})
    logger.finish(failed)
    logger.log_artifact("plots/curve.png")
    with pytest.raises(OSError, match="unreadable"):
        logger.log_artifact("plots/unreadable")
    logger.log_metrics({"loss": 1.0}, 0)  # of the next training
    logger.log_artifact("notes.txt")
    assert logger.runs == {"run 0": ["open", "params", end, "open", "curve.png", end, "open", end],
                           "run 1": ["open", 0, "notes.txt"]}


def test_the_run_that_has_ended_can_be_read_and_keeps_its_files():
    logger = Records()
    logger.log_params({})
    logger.finish()
    assert logger.run == "run 0"
    logger.log_artifact("notes.txt")
    assert logger.runs == {"run 0": ["open", "params", "closed", "open", "notes.txt", "closed"]}
    logger.log_metrics({"loss": 1.0}, 0)
    assert logger.run == "run 1"


def test_a_file_before_the_first_training_goes_to_its_run():
    logger = Records()
    logger.log_artifact("notes.txt")
    logger.log_params({})
    logger.finish()
    logger.load_state_dict({"run": None})  # a training that resumes, and had no run yet
    logger.log_artifact("more.txt")
    assert logger.runs == {"run 0": ["open", "notes.txt", "params", "closed"], "run 1": ["open", "more.txt"]}


def test_a_given_run_gets_files_at_any_time_and_stays_open():
    logger = Records(run="mine")
    logger.log_params({})
    logger.finish()
    logger.finish()
    logger.log_artifact("notes.txt")
    assert logger.runs == {"mine": ["params", "notes.txt"]}
