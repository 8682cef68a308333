"""The agent's machine without processes, case by case."""

from __future__ import annotations

import signal

import pytest

from paceline.control.exit_codes import FULL, HALTED, START_AGAIN
from paceline.control.messages.agents import AgentDirective
from paceline.engine.events import (
    AgentTick,
    AskHalt,
    CoordinatorEnded,
    CoordinatorLost,
    Event,
    Exited,
    NotStarted,
    Opened,
    PrintLine,
    Resumed,
    RunResult,
    Signal,
    SignalCoordinator,
    StartCoordinator,
    StopAsked,
    StopSelf,
    Suspended,
)
from paceline.engine.outcome import SupervisorStage
from paceline.engine.slots import AgentRules, SlotState
from tests.engine.driver import KILLED, Driver, sent, starts

# -- workers ---------------------------------------------------------------------------------------------------------


def test_a_dead_worker_is_started_again_after_growing_pauses_and_not_for_ever() -> None:
    driver = Driver(workers=2, restarts=3)
    driver.open_all()
    for pause_s in (0.5, 1.0, 2.0):
        assert starts(driver.tell(Exited(1, KILLED))) == []
        assert driver.machine.wakes_at() == driver.now + pause_s
        assert starts(driver.tell(AgentTick(), pause_s * 0.9)) == []
        assert starts(driver.tell(AgentTick(), pause_s * 0.1 + 1e-6)) == [1]
    assert driver.machine.num_expected == 2
    driver.tell(Exited(1, KILLED))
    assert driver.machine.slots[1].state is SlotState.FINAL
    assert driver.machine.num_expected == 1
    assert starts(driver.tell(AgentTick(), 100.0)) == []
    assert not driver.machine.exhausted, "the other one lives"
    assert any(isinstance(action, PrintLine) and "not started again" in action.text for action in driver.log)


@pytest.mark.parametrize("is_over", [False, True])
def test_a_worker_that_ends_as_if_all_were_well_while_the_run_counts_on_it_is_started_again(is_over: bool) -> None:
    """`os._exit(0)` in the loop: it was taken for one that had left in order."""
    driver = Driver(workers=2, strict=True)
    driver.open_all()
    pid = driver.machine.slots[1].pid
    driver.tell(Exited(1, 0))
    assert driver.machine.slots[1].state is SlotState.FINAL, "who leaves in order ends like this"
    driver.tell(AgentDirective(1, 1, "agent", (), is_over, "all members reached the end", lost=(pid,)))
    if is_over:
        driver.tell(Exited(0, 0))
        driver.tell(CoordinatorEnded(0, "ended"))
        assert driver.machine.outcome is not None
        assert driver.machine.outcome.code == 3
        assert driver.machine.outcome.missing == ("w1 exited with code 0 before the end",)
    else:
        assert starts(driver.tell(AgentTick(), 0.5 + 1e-6)) == [1]


def refusing(driver: Driver, slot: int, number: int = 1) -> AgentDirective:
    return AgentDirective(1, number, "", refused={driver.machine.slots[slot].pid: "seed is 2 here but 1"})


@pytest.mark.parametrize("told_first", [True, False])
def test_a_worker_that_was_refused_is_not_started_again_and_the_end_says_so(told_first: bool) -> None:
    """Whether the agent hears of the refusal before the process ends, or after."""
    for strict in (False, True):
        driver = Driver(workers=2, strict=strict)
        driver.open_all()
        happened: list[Event] = [refusing(driver, 1), Exited(1, 1)]
        for event in happened if told_first else reversed(happened):
            driver.tell(event)
        driver.tell(refusing(driver, 1, 2))
        said = [action.text for action in driver.log if isinstance(action, PrintLine) and "refused" in action.text]
        assert said == ["w1 was refused: seed is 2 here but 1; it is not started again"]
        assert starts(driver.tell(AgentTick(), 100.0)) == []
        driver.tell(Exited(0, 0))
        driver.tell(CoordinatorEnded(0, "ended"))
        outcome = driver.machine.outcome
        assert outcome is not None
        assert outcome.result is RunResult.ENDED
        assert outcome.missing == ("w1 was refused: seed is 2 here but 1",)
        assert outcome.code == (3 if strict else 0)


def test_a_run_that_lost_a_worker_for_good_says_so_and_one_that_replaced_it_does_not() -> None:
    for restarts, lost, code in ((0, ("w1 was killed by SIGKILL",), 3), (1, (), 0)):
        driver = Driver(workers=2, restarts=restarts, strict=True)
        driver.open_all()
        driver.tell(Exited(1, KILLED))
        driver.tell(AgentTick(), 10.0)
        if restarts:
            driver.tell(Exited(1, 0))
        driver.tell(Exited(0, 0))
        driver.tell(CoordinatorEnded(0, "ended"))
        outcome = driver.machine.outcome
        assert outcome is not None
        assert (outcome.missing, outcome.code) == (lost, code)


def test_a_pause_has_a_limit_and_a_long_life_forgives() -> None:
    driver = Driver(workers=2, restarts=9)
    driver.open_all()
    for _ in range(7):
        driver.tell(Exited(1, KILLED))
        driver.tell(AgentTick(), 10.0)
    driver.tell(Exited(1, KILLED))
    assert driver.machine.wakes_at() == driver.now + 10.0
    driver.tell(AgentTick(), 10.0)
    driver.tell(Exited(1, KILLED), after_s=61.0)
    assert driver.machine.wakes_at() == driver.now + 0.5


def test_a_worker_that_ended_well_is_not_started_again() -> None:
    driver = Driver(workers=2)
    driver.open_all()
    driver.tell(Exited(0, 0))
    assert starts(driver.tell(AgentTick(), 100.0)) == []


def test_a_script_that_fails_in_all_workers_at_once_is_not_tried_again() -> None:
    driver = Driver(workers=2)
    driver.open_all()
    driver.tell(Exited(0, 1))
    driver.tell(Exited(1, 1), after_s=0.1)
    assert driver.machine.exhausted
    assert starts(driver.tell(AgentTick(), 100.0)) == []
    driver.directive(1, over=True, reason="ZeroDivisionError")
    driver.tell(CoordinatorEnded(1, "failed"))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome[:2] == (RunResult.FAILED, 1)
    assert driver.machine.outcome.reason == "ZeroDivisionError"


def test_a_worker_that_asks_for_it_is_started_again() -> None:
    driver = Driver(workers=1)
    driver.open_all()
    driver.tell(Exited(0, START_AGAIN))
    assert starts(driver.tell(AgentTick(), 0.6)) == [0]


def test_whom_the_coordinator_names_is_killed_and_comes_back() -> None:
    driver = Driver(workers=2)
    driver.open_all()
    pid = driver.machine.slots[1].pid
    driver.directive(1, kill=(pid, 99))
    assert (1, signal.SIGKILL) in sent(driver.log)
    assert (0, signal.SIGKILL) not in sent(driver.log)
    driver.tell(Exited(1, KILLED))
    assert driver.machine.exits == {pid: "was killed by SIGKILL"}
    assert starts(driver.tell(AgentTick(), 1.0)) == [1]


def test_nothing_is_started_when_the_run_is_over() -> None:
    driver = Driver(workers=2)
    driver.open_all()
    driver.tell(Exited(1, KILLED))
    driver.directive(1, over=True)
    assert starts(driver.tell(AgentTick(), 100.0)) == []
    driver.tell(Exited(0, 0))
    driver.tell(CoordinatorEnded(0, "ended"))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome[:2] == (RunResult.ENDED, 0)


def test_who_comes_too_late_for_the_run_is_sent_away() -> None:
    driver = Driver(workers=2)
    driver.tell(Opened(0))
    driver.directive(1, over=True)
    assert sent(driver.log) == [(1, signal.SIGTERM)]
    driver.tell(AgentTick(), 5.1)
    assert sent(driver.log) == [(1, signal.SIGTERM), (1, signal.SIGKILL)]


def test_who_was_never_known_does_not_wait_for_a_coordinator_that_is_gone() -> None:
    driver = Driver(workers=2)
    driver.open_all()
    pids = frozenset([driver.machine.slots[0].pid])
    assert sent(driver.tell(CoordinatorEnded(0, "ended", pids, pids))) == [(1, signal.SIGTERM)]


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (3, 3), (-11, 139)])
def test_what_a_script_does_wrong_after_the_run_has_its_own_code(code: int, expected: int) -> None:
    driver = Driver(workers=1)
    driver.open_all()
    driver.directive(1, over=True)
    pids = frozenset([driver.machine.slots[0].pid])
    assert driver.tell(CoordinatorEnded(0, "ended", pids, pids)) == []
    driver.tell(Exited(0, code), after_s=1000.0)
    assert driver.machine.outcome is not None
    assert driver.machine.outcome[:3] == (RunResult.FAILED_LATER, expected, 0)


def test_a_failure_after_the_release_is_known_even_if_it_comes_before_the_news() -> None:
    driver = Driver(workers=1)
    driver.open_all()
    driver.tell(Exited(0, 1))
    driver.tell(CoordinatorEnded(0, "ended", frozenset([driver.machine.slots[0].pid])))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome[:3] == (RunResult.FAILED_LATER, 1, 0)


@pytest.mark.parametrize(("code", "missing"), [(3, ("w1 exited with code 3",)), (-9, ()), (START_AGAIN, ())])
def test_a_worker_that_failed_and_had_no_time_to_come_back_is_named(code: int, missing: tuple[str, ...]) -> None:
    driver = Driver(workers=2)
    driver.open_all()
    driver.tell(Exited(1, code))
    driver.directive(1, over=True)
    driver.tell(Exited(0, 0))
    driver.tell(CoordinatorEnded(0, "ended", frozenset([driver.machine.slots[0].pid])))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome[:2] == (RunResult.ENDED, 0)
    assert driver.machine.outcome.missing == missing


# -- plain scripts ---------------------------------------------------------------------------------------------------


def test_a_plain_script_is_over_when_all_have_ended() -> None:
    driver = Driver(workers=2)
    driver.directive(1)
    driver.tell(Exited(0, 0))
    assert AskHalt not in map(type, driver.log)
    actions = driver.tell(Exited(1, 0))
    assert [type(action) for action in actions] == [AskHalt]
    assert not driver.machine.exhausted, "the coordinator would take that for a failure"
    driver.tell(CoordinatorEnded(0, "ended"))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome[:2] == (RunResult.ENDED, 0)


def test_a_coordinator_that_is_not_there_yet_is_not_waited_for() -> None:
    driver = Driver(workers=1)
    actions = driver.tell(Exited(0, 0))
    assert actions == [SignalCoordinator(signal.SIGTERM)]
    assert driver.tell(AgentTick(), 5.1) == [SignalCoordinator(signal.SIGKILL)]
    driver.tell(CoordinatorEnded(KILLED, ""))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome[:2] == (RunResult.ENDED, 0)
    assert len([action for action in driver.log if isinstance(action, StartCoordinator)]) == 1


@pytest.mark.parametrize(("code", "result"), [(3, 3), (1, 1)])
def test_a_plain_process_that_fails_ends_the_others(code: int, result: int) -> None:
    driver = Driver(workers=3)
    assert sent(driver.tell(Exited(1, code))) == [(0, signal.SIGTERM), (2, signal.SIGTERM)]
    driver.tell(Exited(0, -signal.SIGTERM))
    assert sent(driver.tell(AgentTick(), 5.1)) == [(2, signal.SIGKILL)]
    driver.tell(Exited(2, KILLED))
    driver.tell(CoordinatorEnded(-15, ""))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome[:3] == (RunResult.FAILED, result, 1)
    assert starts(driver.log) == [0, 1, 2]


def test_a_death_before_any_session_is_judged_when_it_is_known_what_the_script_is() -> None:
    worker = Driver(workers=2)
    worker.tell(Exited(1, KILLED))
    worker.tell(Opened(0), after_s=2.0)
    assert starts(worker.tell(AgentTick(), 0.6)) == [1]
    plain = Driver(workers=2)
    plain.tell(Exited(1, KILLED))
    assert plain.machine.stage is SupervisorStage.WORKING
    assert sent(plain.tell(AgentTick(), 5.1)) == [(0, signal.SIGTERM)]
    plain.tell(Exited(0, -15))
    plain.tell(CoordinatorEnded(-15, ""))
    assert plain.machine.outcome is not None
    assert plain.machine.outcome[:3] == (RunResult.FAILED, 128 + 9, 1)


def test_who_died_is_at_fault_not_who_failed_for_want_of_it() -> None:
    driver = Driver(workers=3)
    driver.tell(Exited(1, KILLED))
    assert sent(driver.tell(Exited(2, 1), after_s=1.0)) == [(0, signal.SIGTERM)]
    driver.tell(Exited(0, 1))
    driver.tell(CoordinatorEnded(-15, ""))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome[:3] == (RunResult.FAILED, 128 + 9, 1)


def test_a_process_that_cannot_be_started_ends_the_rest() -> None:
    driver = Driver(workers=2)
    driver.tell(NotStarted(1, "no more processes"))
    assert (0, signal.SIGTERM) in sent(driver.log)


# -- signals ---------------------------------------------------------------------------------------------------------


def test_the_first_request_is_polite_the_second_firm_the_third_deadly() -> None:
    driver = Driver(workers=2)
    driver.open_all()
    polite = driver.tell(StopAsked(signal.SIGINT))
    assert [type(action) for action in polite] == [PrintLine, AskHalt]
    assert driver.tell(AgentTick(), 1000.0) == [], "a step may take long"
    assert sent(driver.tell(StopAsked(signal.SIGINT))) == [(0, signal.SIGTERM), (1, signal.SIGTERM)]
    assert sent(driver.tell(StopAsked(signal.SIGINT), 1.0)) == [(0, signal.SIGKILL), (1, signal.SIGKILL)]
    for slot in range(2):
        driver.tell(Exited(slot, KILLED))
    assert starts(driver.tell(AgentTick(), 10.0)) == []
    assert SignalCoordinator(signal.SIGTERM) in driver.log
    driver.tell(CoordinatorEnded(75, ""))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome[:2] == (RunResult.INTERRUPTED, 130)


def test_after_the_second_request_time_kills() -> None:
    driver = Driver(workers=1)
    driver.open_all()
    driver.tell(StopAsked(signal.SIGTERM))
    driver.tell(StopAsked(signal.SIGTERM), 1.0)
    assert sent(driver.tell(AgentTick(), 5.1)) == [(0, signal.SIGKILL)]


def test_signals_that_come_together_are_one_request() -> None:
    """`timeout` sends its signal twice, to its child and to the group."""
    driver = Driver(workers=1)
    driver.open_all()
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
        driver.tell(StopAsked(number), 0.01)
    assert sent(driver.log) == []
    assert sent(driver.tell(AgentTick(), 1000.0)) == []
    assert sent(driver.tell(StopAsked(signal.SIGTERM))) == [(0, signal.SIGTERM)]


def test_a_plain_script_gets_the_signal_itself() -> None:
    driver = Driver(workers=2)
    assert sent(driver.tell(StopAsked(signal.SIGINT))) == [(0, signal.SIGINT), (1, signal.SIGINT)]
    driver.tell(Exited(0, 1))
    driver.tell(Exited(1, -signal.SIGINT))
    driver.tell(CoordinatorEnded(-15, ""))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome[:2] == (RunResult.INTERRUPTED, 130)


def test_a_guest_leaves_the_run_to_the_others() -> None:
    driver = Driver(workers=2, owns_coordinator=False)
    driver.open_all()
    actions = driver.tell(StopAsked(signal.SIGINT))
    assert sent(actions) == [(0, signal.SIGTERM), (1, signal.SIGTERM)]
    assert AskHalt not in map(type, actions)
    driver.tell(Exited(0, 0))
    driver.tell(Exited(1, 0))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome.code == 130


def test_a_guest_ends_when_its_workers_have() -> None:
    driver = Driver(workers=1, owns_coordinator=False)
    driver.open_all()
    driver.tell(Exited(0, 0))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome.code == 0
    failed = Driver(workers=2, owns_coordinator=False)
    failed.open_all()
    failed.directive(1, over=True)
    failed.tell(Exited(0, 0))
    failed.tell(Exited(1, 1))
    assert failed.machine.outcome is not None
    assert failed.machine.outcome[:3] == (RunResult.FAILED_LATER, 1, 1)
    lost = Driver(workers=1, owns_coordinator=False)
    lost.open_all()
    lost.tell(CoordinatorLost())
    lost.tell(Exited(0, -15))
    assert lost.machine.outcome is not None
    assert lost.machine.outcome.code == 1
    assert "coordinator" in lost.machine.outcome.reason


def test_a_guest_of_a_run_that_failed_has_failed_too() -> None:
    driver = Driver(workers=1, owns_coordinator=False)
    driver.open_all()
    driver.tell(AgentDirective(1, 1, "agent", (), True, "ValueError: a fault", failed=True))
    driver.tell(Exited(0, 0))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome[:2] == (RunResult.FAILED, 1)
    assert driver.machine.outcome.reason == "ValueError: a fault"


def test_ctrl_z_stops_everything_and_fg_continues_it() -> None:
    driver = Driver(workers=1)
    assert driver.tell(Suspended()) == [Signal(0, signal.SIGSTOP), SignalCoordinator(signal.SIGSTOP), StopSelf()]
    assert driver.tell(Resumed()) == [SignalCoordinator(signal.SIGCONT), Signal(0, signal.SIGCONT)]


# -- the coordinator -------------------------------------------------------------------------------------------------


def test_a_coordinator_that_dies_is_started_again_but_not_for_ever() -> None:
    driver = Driver(workers=1)
    driver.open_all()
    for _ in range(10):
        assert driver.tell(CoordinatorEnded(KILLED, ""), after_s=1.0) == [StartCoordinator()]
    assert sent(driver.tell(CoordinatorEnded(70, ""))) == [(0, signal.SIGTERM)]
    driver.tell(Exited(0, -15))
    assert driver.machine.outcome is not None
    assert "11 times" in driver.machine.outcome.reason
    slowly = Driver(workers=1)
    for _ in range(50):
        assert slowly.tell(CoordinatorEnded(KILLED, ""), after_s=10.0) == [StartCoordinator()]


def test_a_coordinator_without_room_is_started_again_after_pauses_that_grow_and_abandons_no_run() -> None:
    driver = Driver(workers=1)
    driver.open_all()
    pauses = []
    for _ in range(30):
        assert StartCoordinator() not in driver.tell(CoordinatorEnded(FULL, ""))
        due_at = driver.machine.wakes_at()
        assert due_at is not None
        pauses.append(due_at - driver.now)
        assert StartCoordinator() not in driver.tell(AgentTick(), pauses[-1] - 0.1)
        assert driver.tell(AgentTick(), 0.2) == [StartCoordinator()]
    assert pauses[:6] == pytest.approx([0.5, 1.0, 2.0, 4.0, 8.0, 10.0])
    assert max(pauses) == pytest.approx(10.0)
    assert driver.tell(CoordinatorEnded(KILLED, "")) == [StartCoordinator()]
    driver.tell(CoordinatorEnded(FULL, ""))
    due_at = driver.machine.wakes_at()
    assert due_at is not None
    assert due_at - driver.now == pytest.approx(0.5), "there was room meanwhile"


def test_a_coordinator_that_never_gets_room_lets_the_workers_save_what_they_hold() -> None:
    driver = Driver(workers=1)
    driver.open_all()
    driver.tell(CoordinatorEnded(FULL, ""))
    driver.tell(AgentTick(), 601.0)
    assert Signal(0, signal.SIGTERM) in driver.tell(CoordinatorEnded(FULL, ""))
    driver.tell(Exited(0, HALTED))
    outcome = driver.machine.outcome
    assert outcome is not None
    assert (outcome.result, outcome.code) == (RunResult.HALTED, HALTED)
    assert "disk of the run's folder is full" in outcome.reason


def test_who_asks_for_the_end_while_the_coordinator_waits_for_room_gets_it_when_there_is_some() -> None:
    driver = Driver(workers=1)
    driver.open_all()
    driver.tell(CoordinatorEnded(FULL, ""))
    driver.tell(StopAsked(signal.SIGINT))
    assert driver.tell(AgentTick(), 0.6) == [StartCoordinator()]
    driver.tell(CoordinatorEnded(FULL, ""))
    driver.tell(StopAsked(signal.SIGINT), 1.0)
    driver.tell(Exited(0, -15))
    assert driver.machine.outcome is not None, "the second time it is not waited for"


def test_a_coordinator_that_refuses_its_folder_ends_the_run() -> None:
    driver = Driver(workers=1)
    driver.tell(CoordinatorEnded(2, ""))
    driver.tell(Exited(0, -15))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome[:2] == (RunResult.FAILED, 1)


@pytest.mark.parametrize("rules", [{"workers": 0}, {"workers": 1, "restarts": -1}])
def test_rules_that_make_no_sense_are_refused(rules: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"-n 0|--restarts -1"):
        AgentRules(**rules)  # type: ignore[arg-type]


# -- a coordinator that is gone for good -----------------------------------------------------------------------------


def test_a_coordinator_that_dies_too_often_lets_the_workers_save_what_they_hold() -> None:
    driver = Driver(workers=2)
    driver.open_all()
    for _ in range(10):
        assert any(isinstance(action, StartCoordinator) for action in driver.tell(CoordinatorEnded(KILLED, ""), 1.0))
    actions = driver.tell(CoordinatorEnded(KILLED, ""), 1.0)
    assert [action for action in actions if isinstance(action, Signal)] == [
        Signal(0, signal.SIGTERM),
        Signal(1, signal.SIGTERM),
    ]
    assert not any(isinstance(action, StartCoordinator) for action in actions)
    assert not [action for action in driver.tell(AgentTick(), 60.0) if isinstance(action, Signal)], (
        "they have two minutes"
    )
    driver.tell(Exited(0, HALTED))
    driver.tell(Exited(1, HALTED))
    outcome = driver.machine.outcome
    assert outcome is not None
    assert (outcome.result, outcome.code) == (RunResult.HALTED, HALTED)
    assert "the coordinator ended 11 times" in outcome.reason


def test_workers_that_do_not_end_then_are_killed() -> None:
    driver = Driver(workers=1)
    driver.open_all()
    for _ in range(11):
        driver.tell(CoordinatorEnded(KILLED, ""), 1.0)
    driver.tell(AgentTick(), 121.0)
    assert Signal(0, signal.SIGKILL) in driver.tell(AgentTick(), 6.0)


def test_a_guest_whose_workers_halt_starts_none_again_and_ends_its_servers() -> None:
    driver = Driver(workers=2, servers=1, owns_coordinator=False)
    driver.open_all()
    driver.tell(Exited(0, KILLED))
    driver.tell(Exited(1, HALTED))
    assert starts(driver.tell(AgentTick(), 5.0)) == []
    assert driver.machine.outcome is None
    assert Signal(2, signal.SIGTERM) in driver.log
    driver.tell(Exited(2, 0))
    outcome = driver.machine.outcome
    assert outcome is not None
    assert (outcome.result, outcome.code) == (RunResult.HALTED, HALTED)


def test_a_plain_script_knows_nothing_of_that() -> None:
    driver = Driver(workers=1)
    for _ in range(11):
        driver.tell(CoordinatorEnded(KILLED, ""), 1.0)
    assert driver.machine.stage is SupervisorStage.FAILING
