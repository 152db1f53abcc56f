"""What a signal means while a run with perf cases collects, tests and ends."""

import os
import signal
import types

import pytest

from perfsuite.base.errors import CaseStopped
from perfsuite.plugin import launch
from perfsuite.plugin.launch import Signals

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


class Config:
    """As much of pytest's as the handlers ask."""

    def __init__(self):
        self.session = types.SimpleNamespace(shouldstop=False, exitstatus=0)
        self.pluginmanager = types.SimpleNamespace(get_plugin=lambda name: self.session)
        self.cleanups = []
        self.add_cleanup = self.cleanups.append


@pytest.fixture
def killed(monkeypatch):
    """Signals that the run sends itself after it has given the handlers back; they would end this process."""
    numbers = []
    monkeypatch.setattr(launch.os, "kill", lambda _, number: numbers.append(number))
    return numbers


@pytest.fixture
def clock(monkeypatch):
    """Seconds, set by the test."""
    now = [100.0]
    monkeypatch.setattr(launch.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def run(clock):
    before = {number: signal.getsignal(number) for number in (INT, TERM, HUP)}
    config = Config()
    installed = Signals(config)
    installed.install()
    installed.session = config.session
    installed.config = config
    yield installed
    for number, handler in before.items():
        signal.signal(number, handler)


def send(*numbers):
    for number in numbers:
        signal.raise_signal(number)


def test_ctrl_c_interrupts_once_and_repetitions_are_dropped(run, clock):
    with pytest.raises(KeyboardInterrupt):
        send(INT)
    send(INT, INT, TERM)
    assert run.session.shouldstop is False
    run.phase = "ends"
    clock[0] += 5
    send(INT)
    assert run.session.exitstatus == pytest.ExitCode.INTERRUPTED
    send(INT, INT)


@pytest.mark.parametrize("number", [TERM, HUP])
def test_sigterm_stops_the_case_that_runs_and_the_session(run, number):
    run.phase, run.running = "tests", True
    with pytest.raises(CaseStopped, match=f"stopped by {number.name} while this case was running"):
        send(number)
    send(number, INT)
    assert (run.hurried, run.session.shouldstop) == (True, f"perfsuite: stopped by {number.name}")


def test_sigterm_before_the_tests_ends_the_run_at_once(run):
    with pytest.raises(pytest.exit.Exception, match="perfsuite: stopped by SIGTERM"):
        send(TERM)


def test_a_test_that_is_no_perf_case_may_send_itself_signals(run, killed):
    run.phase, run.plain = "tests", True
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            send(INT)
    send(TERM)
    assert run.session.shouldstop == "perfsuite: stopped by SIGTERM"
    assert killed == []
    send(TERM)
    assert killed == [TERM]
    assert signal.getsignal(TERM) != run._take


def test_a_launcher_may_stop_a_run_whose_agent_was_lost_before_the_case_is_reported(run, clock, killed):
    run.phase, run.hurried = "tests", True
    run.session.shouldstop = "perfsuite: the agent of rank 1 is lost"
    send(TERM, TERM, HUP)
    assert (run.session.shouldstop, killed) == ("perfsuite: the agent of rank 1 is lost", [])
    clock[0] += 5
    send(TERM)  # a fixture that hangs must end
    assert killed == [TERM]


def test_while_reports_are_written_nothing_interrupts(run, clock, killed):
    run.phase = "ends"
    for number in (INT, TERM, HUP, TERM, INT):
        send(number)
        clock[0] += 2
    assert (run.hurried, run.session.exitstatus, killed) == (True, pytest.ExitCode.INTERRUPTED, [])


def test_a_signal_waits_until_a_line_is_written(run):
    written = []

    def write():
        with run.held():
            send(INT, INT)
            written.append("inner")
        written.append("line")

    with pytest.raises(KeyboardInterrupt), run.held():
        write()
    assert written == ["inner", "line"]
    run.phase, run.running = "tests", True
    run._last_s.clear()
    with pytest.raises(CaseStopped), run.held():
        send(TERM)


def test_handlers_go_back_after_the_run_after_a_burst_that_outlasts_it(run, clock, killed, monkeypatch):
    monkeypatch.setattr(launch, "is_command", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        send(INT)
    clock[0] += 5
    (restore,) = run.config.cleanups
    restore()
    send(INT, INT)
    assert killed == []
    clock[0] += 5
    send(INT)
    assert killed == [INT]
    assert signal.getsignal(INT) is signal.default_int_handler


@pytest.mark.parametrize("signalled", [True, False])
def test_handlers_go_back_at_once_in_a_program_that_goes_on_or_without_signals(run, monkeypatch, signalled):
    monkeypatch.setattr(launch, "is_command", lambda: not signalled)
    if signalled:
        with pytest.raises(KeyboardInterrupt):
            send(INT)
    (restore,) = run.config.cleanups
    restore()
    assert signal.getsignal(INT) is signal.default_int_handler
    assert all(signal.getsignal(number) != run._take for number in (TERM, HUP))


def test_a_handler_that_came_later_stays(run):
    signal.signal(TERM, signal.SIG_IGN)
    (restore,) = run.config.cleanups
    restore()
    assert signal.getsignal(TERM) is signal.SIG_IGN


def test_ignored_signals_stay_ignored():
    before = signal.signal(HUP, signal.SIG_IGN)
    others = {number: signal.getsignal(number) for number in (INT, TERM)}
    try:
        Signals(Config()).install()
        assert signal.getsignal(HUP) is signal.SIG_IGN
        os.kill(os.getpid(), HUP)
    finally:
        signal.signal(HUP, before)
        for number, handler in others.items():
            signal.signal(number, handler)
