"""Servers beside the workers of an agent: what is done with them, and that they decide nothing. Without processes."""

from __future__ import annotations

import signal

import pytest

from paceline.control.exit_codes import HALTED, START_AGAIN
from paceline.control.machines.coordinator_events import RunSettings
from paceline.control.messages.agents import AgentDirective
from paceline.engine.events import (
    AgentTick,
    AskHalt,
    CoordinatorEnded,
    CoordinatorLost,
    Exited,
    NotStarted,
    Opened,
    PrintLine,
    RunResult,
    SignalCoordinator,
    StopAsked,
    Suspended,
)
from paceline.engine.local import SERVER_COMMAND, Job
from paceline.engine.running import Hosting
from paceline.engine.slots import AgentRules, SlotState
from paceline.engine.speeds import parse_ranges
from tests.engine.driver import KILLED, Driver, sent, starts

# Of an agent with two workers and two servers.
W0, W1, S0, S1 = range(4)


def at_work(**rules: object) -> Driver:
    driver = Driver(**{"workers": 2, "servers": 2} | rules)
    driver.open_all()
    return driver


def said(driver: Driver) -> str:
    return "\n".join(action.text for action in driver.log if isinstance(action, PrintLine))


def pids(driver: Driver, *slots: int) -> frozenset[int]:
    return frozenset(driver.machine.slots[slot].pid for slot in slots)


# -- as long as the run goes on --------------------------------------------------------------------------------------


def test_a_server_that_dies_is_started_again_within_its_own_budget() -> None:
    driver = at_work(restarts=2)
    assert starts(driver.log) == [W0, W1, S0, S1]
    for pause_s in (0.5, 1.0):
        driver.tell(Exited(S0, KILLED))
        assert driver.machine.wakes_at() == driver.now + pause_s
        assert starts(driver.tell(AgentTick(), pause_s)) == [S0]
    assert not driver.machine.servers_exhausted
    driver.tell(Exited(S0, KILLED))
    assert "s0 was killed by SIGKILL; it is started again in 1 s" in said(driver)
    assert "s0 was killed by SIGKILL; it is not started again" in said(driver)
    driver.tell(Exited(S1, START_AGAIN))
    driver.tell(Exited(W0, KILLED))
    assert starts(driver.tell(AgentTick(), 0.5)) == [W0, S1], "others have their own"
    assert sent(driver.log) == []


def test_a_server_that_was_asked_to_leave_is_not_started_again() -> None:
    driver = at_work()
    driver.tell(Exited(S0, 0))
    assert starts(driver.tell(AgentTick(), 100.0)) == []
    driver.tell(Exited(S1, 0))
    assert driver.machine.servers_exhausted
    assert not driver.machine.exhausted
    assert driver.machine.outcome is None


def test_servers_that_cannot_work_are_given_up_and_the_workers_are_not() -> None:
    driver = at_work()
    driver.tell(Exited(S0, 1))
    driver.tell(Exited(S1, 1))
    assert driver.machine.servers_exhausted
    assert said(driver).endswith("s1 exited with code 1; it is not started again")
    assert starts(driver.tell(AgentTick(), 100.0)) == []
    driver.tell(Exited(W0, KILLED))
    assert starts(driver.tell(AgentTick(), 1.0)) == [W0]


def test_a_script_that_fails_everywhere_is_given_up_though_servers_live() -> None:
    driver = at_work()
    driver.tell(Exited(S0, KILLED))
    driver.tell(Exited(W0, 1))
    driver.tell(Exited(W1, 1))
    assert driver.machine.exhausted
    assert not driver.machine.servers_exhausted
    assert "no worker is left here" in said(driver)
    assert starts(driver.tell(AgentTick(), 100.0)) == [S0], "others may need it"
    assert driver.machine.outcome is None


def test_a_server_that_cannot_be_started_is_named_and_ends_nothing() -> None:
    driver = at_work()
    driver.tell(Exited(S0, KILLED))
    driver.tell(AgentTick(), 0.5)
    driver.tell(NotStarted(S0, "s0 cannot be started: no more processes"))
    assert "no more processes" in said(driver)
    assert driver.machine.slots[S0].state is SlotState.FINAL
    assert sent(driver.log) == []


def test_whom_the_coordinator_names_is_killed_and_comes_back() -> None:
    driver = at_work()
    (pid,) = pids(driver, S1)
    driver.directive(1, kill=(pid,))
    assert sent(driver.log) == [(S1, signal.SIGKILL)]
    driver.tell(Exited(S1, KILLED))
    assert driver.machine.exits == {pid: "was killed by SIGKILL"}
    assert starts(driver.tell(AgentTick(), 0.5)) == [S1]


def test_servers_serve_others_when_no_worker_is_left_here() -> None:
    for owns_coordinator in (True, False):
        driver = at_work(owns_coordinator=owns_coordinator)
        driver.tell(Exited(W0, 0))
        driver.tell(Exited(W1, 0))
        assert driver.machine.exhausted
        driver.tell(Exited(S0, KILLED))
        assert starts(driver.tell(AgentTick(), 100.0)) == [S0]
        assert sent(driver.log) == []
        assert driver.machine.outcome is None


# -- the end ---------------------------------------------------------------------------------------------------------


def test_after_the_run_servers_have_time_to_end_then_are_asked_then_killed() -> None:
    driver = at_work()
    driver.directive(1, over=True)
    everybody = pids(driver, W0, W1, S0, S1)
    driver.tell(Exited(W0, 0))
    driver.tell(Exited(W1, 0))
    driver.tell(Exited(S0, 0))
    assert driver.tell(CoordinatorEnded(0, "ended", everybody, everybody)) == []
    assert driver.machine.wakes_at() == driver.now + 15.0
    assert driver.tell(AgentTick(), 14.9) == []
    assert sent(driver.tell(AgentTick(), 0.2)) == [(S1, signal.SIGTERM)]
    assert sent(driver.tell(AgentTick(), 5.1)) == [(S1, signal.SIGKILL)]
    assert driver.tell(AgentTick(), 100.0) == [], "once is enough"
    assert driver.machine.outcome is None, "one is left"
    driver.tell(Exited(S1, KILLED))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome[:2] == (RunResult.ENDED, 0)


def test_nothing_is_started_after_the_run_and_late_servers_are_sent_away() -> None:
    driver = Driver(workers=1, servers=2)
    driver.tell(Opened(0))
    driver.tell(Exited(1, KILLED))
    driver.directive(1, over=True)
    assert sent(driver.log) == [(2, signal.SIGTERM)], "it has not taken its ticket"
    assert starts(driver.tell(AgentTick(), 100.0)) == []
    strange = Driver(workers=1, servers=1)
    strange.open_all()
    known = pids(strange, 0)
    assert sent(strange.tell(CoordinatorEnded(0, "ended", known, known))) == [(1, signal.SIGTERM)]


def test_a_server_that_ends_badly_does_not_fail_the_run() -> None:
    driver = at_work()
    driver.directive(1, over=True)
    everybody = pids(driver, W0, W1, S0, S1)
    driver.tell(CoordinatorEnded(0, "ended", everybody, everybody))
    for slot, code in ((S0, 1), (S1, KILLED), (W0, 0), (W1, 0)):
        driver.tell(Exited(slot, code))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome[:2] == (RunResult.ENDED, 0)


def test_the_servers_of_a_plain_script_end_with_it() -> None:
    driver = Driver(workers=2, servers=2)
    driver.directive(1)
    driver.tell(Opened(S0))
    driver.tell(Opened(S1))
    driver.tell(Exited(W0, 0))
    assert sent(driver.log) == [], "it is not over yet, and servers do not make a session"
    actions = driver.tell(Exited(W1, 0))
    assert sent(actions) == [(S0, signal.SIGTERM), (S1, signal.SIGTERM)]
    assert AskHalt in map(type, actions)
    assert not driver.machine.exhausted, "the coordinator would take that for a failure"
    driver.tell(Exited(S0, -signal.SIGTERM))  # it could not answer the signal yet
    assert starts(driver.tell(AgentTick(), 1.0)) == []
    driver.tell(CoordinatorEnded(0, "ended"))
    assert sent(driver.tell(AgentTick(), 4.1)) == [(S1, signal.SIGKILL)]
    driver.tell(Exited(S1, KILLED))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome[:2] == (RunResult.ENDED, 0)


def test_a_server_that_waits_for_its_start_is_not_started_for_a_plain_script_that_has_ended() -> None:
    driver = Driver(workers=1, servers=1)
    driver.directive(1)
    driver.tell(Exited(1, KILLED))
    driver.tell(Exited(0, 0))
    assert starts(driver.tell(AgentTick(), 1.0)) == []
    driver.tell(CoordinatorEnded(0, "ended"))
    assert driver.machine.outcome is not None


def test_a_plain_process_that_fails_ends_the_servers_too_and_its_code_is_the_runs() -> None:
    driver = Driver(workers=1, servers=1)
    driver.tell(Opened(1))
    assert sent(driver.tell(Exited(0, 3))) == [(1, signal.SIGTERM)]
    driver.tell(Exited(1, 0))
    driver.tell(CoordinatorEnded(-15, ""))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome[:3] == (RunResult.FAILED, 3, 0)


def test_a_plain_process_in_doubt_is_not_kept_waiting_by_a_server() -> None:
    driver = Driver(workers=1, servers=1)
    driver.tell(Opened(1))
    assert sent(driver.tell(Exited(0, KILLED))) == [(1, signal.SIGTERM)]


# -- signals ---------------------------------------------------------------------------------------------------------


def test_the_first_request_leaves_servers_to_the_coordinator_the_second_does_not() -> None:
    driver = at_work()
    assert sent(driver.tell(StopAsked(signal.SIGINT))) == []
    driver.tell(Exited(W0, 0))
    driver.tell(Exited(W1, 0))
    assert sent(driver.log) == []
    assert sent(driver.tell(StopAsked(signal.SIGINT), 1.0)) == [(S0, signal.SIGTERM), (S1, signal.SIGTERM)]
    assert sent(driver.tell(StopAsked(signal.SIGINT), 1.0)) == [(S0, signal.SIGKILL), (S1, signal.SIGKILL)]
    driver.tell(Exited(S0, KILLED))
    driver.tell(Exited(S1, KILLED))
    assert SignalCoordinator(signal.SIGTERM) in driver.log + driver.tell(AgentTick(), 5.1)
    driver.tell(CoordinatorEnded(75, ""))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome[:2] == (RunResult.INTERRUPTED, 130)


def test_a_plain_script_gets_the_signal_itself_and_its_servers_are_asked_when_it_has_ended() -> None:
    driver = Driver(workers=1, servers=1)
    driver.tell(Opened(1))
    assert sent(driver.tell(StopAsked(signal.SIGINT))) == [(0, signal.SIGINT)]
    assert sent(driver.tell(Exited(0, -signal.SIGINT))) == [(1, signal.SIGTERM)]
    driver.tell(Exited(1, 0))
    driver.tell(CoordinatorEnded(-15, ""))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome[:2] == (RunResult.INTERRUPTED, 130)


def test_ctrl_z_stops_servers_too() -> None:
    assert sent(Driver(workers=1, servers=1).tell(Suspended())) == [(0, signal.SIGSTOP), (1, signal.SIGSTOP)]


# -- guests ----------------------------------------------------------------------------------------------------------


def test_a_guest_leaves_with_its_servers() -> None:
    driver = at_work(owns_coordinator=False)
    asked = sent(driver.tell(StopAsked(signal.SIGINT)))
    assert asked == [(slot, signal.SIGTERM) for slot in (W0, W1, S0, S1)]
    for slot in (W0, W1, S0):
        driver.tell(Exited(slot, 0))
    assert driver.tell(AgentTick(), 1000.0) == [], "to hand over what it holds may take long"
    driver.tell(Exited(S1, 0))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome.code == 130


def test_a_guest_may_have_servers_only() -> None:
    def guest() -> Driver:
        return Driver(workers=0, servers=2, owns_coordinator=False, restarts=1)

    released = guest()
    assert released.machine.exhausted, "no worker will ever come from here"
    released.open_all()
    released.tell(Exited(0, KILLED))
    assert starts(released.tell(AgentTick(), 0.5)) == [0]
    released.tell(Opened(0))
    released.directive(1, over=True)
    assert sent(released.log) == []
    released.tell(Exited(0, 0))
    released.tell(Exited(1, 0))
    assert released.machine.outcome is not None
    assert released.machine.outcome[:2] == (RunResult.ENDED, 0)

    broken = guest()
    broken.tell(Exited(0, 1))
    broken.tell(Exited(1, 1))
    assert broken.machine.outcome is not None
    assert broken.machine.outcome[:3] == (RunResult.FAILED, 1, 0)

    lost = guest()
    lost.open_all()
    assert sent(lost.tell(CoordinatorLost())) == [(0, signal.SIGTERM), (1, signal.SIGTERM)]

    deserted = guest()
    deserted.open_all()
    assert sent(deserted.tell(Exited(0, HALTED))) == [(1, signal.SIGTERM)]
    deserted.tell(Exited(1, KILLED))
    assert deserted.machine.outcome is not None
    assert deserted.machine.outcome[:2] == (RunResult.HALTED, HALTED)

    failed = guest()
    failed.open_all()
    failed.tell(AgentDirective(1, 1, "agent", (), True, "ValueError: a fault", failed=True))
    failed.tell(Exited(0, 0))
    failed.tell(Exited(1, 0))
    assert failed.machine.outcome is not None
    assert failed.machine.outcome[:2] == (RunResult.FAILED, 1)


def test_a_server_that_halts_where_workers_live_is_started_again() -> None:
    """Whether the coordinator is gone is for the workers to say."""
    driver = at_work(owns_coordinator=False)
    assert sent(driver.tell(Exited(S0, HALTED))) == []
    assert starts(driver.tell(AgentTick(), 0.5)) == [S0]


# -- what may be asked for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ({"workers": 0, "servers": 1}, "-n 0: a run needs at least one worker"),
        ({"workers": 1, "servers": -1}, "--servers -1: give 0"),
        ({"workers": -1, "servers": 1, "owns_coordinator": False}, "-n -1: give 0"),
        ({"workers": 0, "servers": 0, "owns_coordinator": False}, "nothing would be started"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: dict[str, int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        AgentRules(**rules)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("servers", "replicas", "problem"),
    [
        (-1, 1, "--servers -1: give 0"),
        (2, 0, "--replicas 0: give 1"),
        (0, 0, "--replicas 0: give 1"),
        (0, 2, "--replicas 2 .* there are none; give --servers 2 or more"),
        (2, 3, "each replica needs its own server; give --servers 3 or more, or --replicas 2 or fewer"),
    ],
)
def test_settings_that_make_no_sense_are_refused(servers: int, replicas: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RunSettings(servers=servers, replicas=replicas)


def test_ranges_are_divided_by_load_unless_they_are_fixed() -> None:
    assert Hosting(workers=1, servers=2).settings().by_load
    assert not Hosting(workers=1, servers=2, by_load=parse_ranges("fixed")).settings().by_load


def test_servers_stand_in_the_slots_after_the_workers() -> None:
    assert [slot.label for slot in at_work().machine.slots] == ["w0", "w1", "s0", "s1"]
    job = Job(command=("train.py", "--lr", "1"), workers=2, run="a", environment={"OWN": "1"})
    assert job.command_of(W1) == ("train.py", "--lr", "1")
    assert job.command_of(S0) == SERVER_COMMAND
    assert job.environment_of(W1, {}, 1)["RANK"] == "1"
    server = job.environment_of(S0, {}, 1)
    assert server["PACELINE_RUN"] == "a"
    assert server["OWN"] == "1"
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"} & set(server)
    assert int(Job(command=(), workers=0, run="a").environment_of(0, {}, 1)["OMP_NUM_THREADS"]) > 0


def test_servers_beside_a_script_without_a_session_are_told_to_be_of_no_use() -> None:
    for has_session in (False, True):
        driver = Driver(workers=1, servers=1)
        if has_session:
            driver.open_all()
        driver.tell(Exited(0, 0))
        driver.tell(Exited(1, 0))
        driver.tell(CoordinatorEnded(0, "ended"))
        outcome = driver.machine.outcome
        assert outcome is not None
        assert outcome.result is RunResult.ENDED
        said = [action.text for action in driver.log if isinstance(action, PrintLine)]
        assert ("the servers were not used: the script has no session" in said) is not has_session


def test_servers_of_a_run_that_was_stopped_before_its_script_had_a_session_are_not_called_useless() -> None:
    driver = Driver(workers=1, servers=1)
    driver.tell(AgentDirective(1, 1, "agent", over=True, verdict="a person asked for the end"))
    driver.tell(Exited(0, -15))
    driver.tell(Exited(1, 0))
    driver.tell(CoordinatorEnded(0, "ended"))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome.result is RunResult.ENDED
    assert not [action for action in driver.log if isinstance(action, PrintLine) and "not used" in action.text]
