"""Which process is the cause when a job does not go on, by the reports of all."""

import pytest

from trainer.distribute.cluster.liveness.diagnosis import Observer, Report, Seen, diagnose, is_repeated


def seen(phase, step=7, still=0.0, silent=0.0, moves=1):
    return Seen(Report(1, moves, step, phase), silent, still)


def judged(*processes, timeout_secs=4.0):
    return diagnose(dict(enumerate(processes)), len(processes), timeout_secs)


def test_a_worker_that_is_not_heard_is_lost_even_if_no_other_waits_for_it():
    assert judged(seen("host"), seen("data", silent=3.9, still=3.9)) is None
    assert judged(seen("host"), seen("data", silent=4.0, still=4.0)) == (
        'worker 1 is lost: nothing was heard of it for 4.0 s. It was at step 7, in "data", up to 4.0 s ago.')


def test_if_something_is_known_to_be_wrong_less_silence_is_enough():
    silent = {0: seen("host"), 1: seen("data", silent=20.0)}
    assert diagnose(silent, 2, 300.0) is None
    assert diagnose(silent, 2, 300.0, silence_secs=20.0).startswith("worker 1 is lost")


def test_a_worker_at_work_that_another_one_waits_for_has_stalled():
    busy, waits = seen("data", still=4.5), seen("device", still=4.1)
    assert judged(waits, busy, seen("host")) == (
        'worker 1 has stalled at step 7, in "data" for 4.5 s, while worker 0 waits (step 7, "device").')
    assert judged(seen("device", still=3.9), busy, seen("host")) is None, "nobody has waited for long"
    assert judged(waits, seen("data", still=3.9)) is None
    assert judged(waits, seen("data", step=8, still=9.0), seen("host")) is None, "it is ahead of who waits"


def test_if_all_stand_still_the_one_with_work_of_its_own_is_the_cause():
    assert judged(seen("host", 6, still=9.0), seen("data", still=4.0)).startswith("worker 1 has stalled at step 7")
    assert judged(seen("host", still=9.0), seen("host", 6, still=4.0)).startswith("worker 1 has stalled at step 6")
    assert judged(seen("host", still=9.0), seen("compile", still=4.0)) is None
    assert judged(seen("data", still=9.0), seen("compile", still=9.0)).startswith("worker 0 has stalled")
    assert judged(seen("data", 9, still=5.0), seen("callbacks", 8, still=5.0)).startswith("worker 1 has stalled")


@pytest.mark.parametrize("phase", ["device", "host"])
def test_if_all_wait_there_is_no_cause(phase):
    text = judged(seen(phase, still=5.0), seen(phase, still=4.0))
    assert text.startswith("all workers wait for their devices, for 4.0 s: worker 0 at step 7, worker 1 at step 7.")


@pytest.mark.parametrize("phase", ["device", "host"])
def test_an_epoch_that_ends_in_one_worker_and_goes_on_in_another_is_told_from_devices_that_hang(phase):
    ended = seen("agreement", 5, still=4.0)
    text = judged(seen(phase, 9, still=5.0), ended, seen(phase, 9, still=5.0))
    assert text.startswith("an epoch has ended in worker 1 after step 5, while worker 0 has begun step 9 of it with "
                           "further batches: the data of worker 1 have ended early")
    assert is_repeated(text)
    assert judged(seen(phase, 9, still=1.0), seen("agreement", 5, still=1.0)) == text
    assert judged(seen(phase, 9, still=0.9), ended) is None, "the reports may be of different moments"
    assert "further batches" not in judged(seen(phase, 5, still=5.0), ended)
    assert "further batches" not in judged(seen("device", 5, still=5.0), seen(phase, 9, still=5.0))
    assert not is_repeated(judged(seen(phase, 5, still=5.0), ended))
    assert judged(seen("data", 5, still=5.0), seen("agreement", 5, still=5.0)).startswith("worker 0 has stalled")


@pytest.mark.parametrize("phase", ["compile", "checkpoint", "idle"])
def test_phases_that_take_long_have_ten_times_the_limit(phase):
    assert judged(seen("device", still=39.0), seen(phase, still=39.9)) is None
    assert judged(seen("device", still=39.0), seen(phase, still=40.0)).startswith(f'worker 1 has stalled at step 7, in '
                                                                                   f'"{phase}" for 40.0 s')


def test_outside_of_runs_there_is_no_limit():
    assert judged(seen("idle", still=1e6), seen("idle", still=1e6)) is None
    assert judged(seen("idle", still=1e6), seen("stopped", still=1e6, silent=1e6)) is None


def test_a_worker_that_has_ended_is_not_lost_but_must_not_be_awaited():
    ended = seen("stopped", still=50.0, silent=50.0)
    assert judged(seen("host"), ended) is None
    left = "worker 1 has left the job: its script has ended, at step 7, while worker 0 waits"
    assert judged(seen("device", still=4.0), ended).startswith(left)
    assert judged(seen("checkpoint", still=4.0), ended).startswith(left)
    assert judged(seen("checkpoint", still=4.0), seen("data")) is None
    assert judged(seen("data", still=4.0), ended).startswith("worker 0 has stalled")


def test_nobody_stalls_before_all_have_begun():
    waits, stuck = seen("device", still=99.0), seen("data", still=99.0)
    assert diagnose({0: waits, 1: stuck}, 3, 4.0) is None
    assert judged(waits, stuck, seen("idle", moves=0)) is None
    assert judged(waits, stuck, seen("idle", moves=1)) is not None


def test_a_worker_that_may_be_lost_has_not_stalled():
    assert judged(seen("device", still=9.0), seen("data", still=9.0, silent=2.5)) is None


def test_all_take_over_what_one_has_concluded_and_do_not_take_it_for_the_cause():
    left = Seen(Report(9, 1, 7, "device", "worker 2 has stalled."), 9.0, 9.0)
    assert judged(seen("device", still=9.0), left, seen("data", 3)) == "worker 2 has stalled."


def test_time_in_which_a_process_did_not_look_does_not_count():
    observer = Observer(heartbeat_secs=1.0)
    report = Report(1, 1, 1, "data")
    observer.hear(100.0, 1, report)
    assert observer.seen(100.0) == {1: Seen(report, 0.0, 0.0)}
    assert observer.seen(101.0) == {1: Seen(report, 1.0, 1.0)}
    assert observer.seen(901.0) == {1: Seen(report, 3.0, 3.0)}, "it was suspended itself"
    heartbeat = Report(2, 1, 1, "data")
    observer.hear(902.0, 1, heartbeat)
    assert observer.seen(902.0) == {1: Seen(heartbeat, 0.0, 4.0)}
    move = Report(3, 2, 1, "data")
    observer.hear(903.0, 1, move)
    assert observer.seen(903.5) == {1: Seen(move, 0.5, 0.5)}
