"""The faults, one small function for each kind. Each returns whom it hit, and how it is lifted after its length."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from paceline.control.exit_codes import HALTED
from paceline.custody import names
from paceline.testing.chaos import expecting, heads
from paceline.testing.chaos.expecting import evicts, hosts_of
from paceline.testing.chaos.schedule import Fault, FaultKind
from paceline.testing.chaos.stage import ChaosRun, ChaosTimeout, Command
from paceline.testing.faults import fill

SLOW = "20mbit"
_FILLER = "filler"
_GUEST_S = 20.0


class Hit(NamedTuple):
    """`victims` are pids of workers that may end or stand still; `lift` undoes what lasts. `skipped` says why nothing
    was done: there was nobody to hit."""

    victims: Iterable[int] = ()
    lift: Callable[[], None] | None = None
    skipped: str = ""


def _nobody(what: str) -> Hit:
    return Hit(skipped=f"there was no {what}")


# -- processes -------------------------------------------------------------------------------------------------------


def kill(stage: ChaosRun, fault: Fault) -> Hit:
    return _kill_workers(stage, fault, 1)


def pair(stage: ChaosRun, fault: Fault) -> Hit:
    return _kill_workers(stage, fault, 2)


def kill_all(stage: ChaosRun, fault: Fault) -> Hit:
    return _kill_workers(stage, fault, len(stage.living()))


def _kill_workers(stage: ChaosRun, fault: Fault, count: int) -> Hit:
    pids = [worker.pid for worker in stage.living()]
    if not pids:
        return _nobody("worker")
    chosen = {pids[(fault.target + number) % len(pids)] for number in range(count)}
    stage.kill(*chosen)
    return Hit(chosen)


def stop(stage: ChaosRun, fault: Fault) -> Hit:
    pids = [worker.pid for worker in stage.living()]
    if not pids:
        return _nobody("worker")
    pid = pids[fault.target % len(pids)]
    stage.send(signal.SIGSTOP, pid)
    return Hit([pid] if evicts(fault) else [], lambda: stage.send(signal.SIGCONT, pid))


def kill_coordinator(stage: ChaosRun, _: Fault) -> Hit:
    pid = stage.coordinator()
    if pid is None:
        return _nobody("coordinator")
    stage.kill(pid)
    return Hit()


def pause_coordinator(stage: ChaosRun, _: Fault) -> Hit:
    pid = stage.coordinator()
    if pid is None:
        return _nobody("coordinator")
    stage.send(signal.SIGSTOP, pid)
    return Hit(lift=lambda: stage.send(signal.SIGCONT, pid))


def kill_loader(stage: ChaosRun, fault: Fault) -> Hit:
    pids = stage.loaders()
    if not pids:
        return _nobody("loader worker")
    stage.kill(pids[fault.target % len(pids)])
    return Hit()


def kill_server(stage: ChaosRun, fault: Fault) -> Hit:
    pids = stage.servers()
    if not pids:
        return _nobody("server")
    stage.kill(pids[fault.target % len(pids)])
    return Hit()


def kill_agent(stage: ChaosRun, fault: Fault) -> Hit:
    """A guest's agent: its workers die with it. That of host 0: everything there dies, and is resumed."""
    host = fault.target % stage.schedule.hosts
    agents = [one for one in stage.commands if one.host == host and one.is_alive]
    if not agents:
        return _nobody("agent")
    if host == 0:
        return _kill_head(stage)
    victims = {worker.pid for worker in stage.workers_on(host)}
    for agent in agents:
        agent.is_victim = True
        agent.process.kill()
    stage.killed.update(victims)
    return Hit(victims)


def _kill_head(stage: ChaosRun) -> Hit:
    """At once, with those of other hosts: nobody has the time to notice that the coordinator is gone."""
    victims = {worker.pid for worker in stage.living()}
    for command in [one for one in stage.commands if one.is_alive]:
        command.is_victim = True
        command.process.kill()
        command.process.wait()
    stage.wait_until(lambda: not stage.processes(), 10.0, "what the agents started to die with them")
    victims |= stage.beats.look().keys()
    begin_again(stage)
    return Hit(victims)


def lose_head(stage: ChaosRun, fault: Fault) -> Hit:
    """Host 0 is lost with all that runs there, and with its cable if the target is even. The others must leave what
    they hold on their own hosts, and end; the run goes on from there, with host 0 as a guest."""
    victims = {worker.pid for worker in stage.living()}
    commands = [one for one in stage.commands if one.is_alive]
    is_whole = len(stage.at_work()) >= stage.num_wanted()
    head = stage.lab[0]
    if fault.target % 2 == 0:
        head.cut()
    for command in commands:
        command.is_victim = command.host == 0
    stage.kill(*(pid for pid in stage.processes() if stage.host_of(pid) == 0))
    guests = [one for one in commands if not one.is_victim]
    wait_ended(stage, guests, "the loss of host 0", (HALTED,), expecting.HALT_S)
    victims |= stage.beats.look().keys()
    head.mend()
    stage.violations += heads.wrong_with(stage, guests, is_whole=is_whole)
    heir = heads.heir_of(stage, guests)
    if heir is not None:
        stage.take_over(*heir)
    begin_again(stage)
    return Hit(victims)


# -- the network -----------------------------------------------------------------------------------------------------


def cut(stage: ChaosRun, fault: Fault) -> Hit:
    host = stage.lab[fault.target % stage.schedule.hosts]
    host.cut()
    return Hit(_victims_behind(stage, fault), host.mend)


def oneway(stage: ChaosRun, fault: Fault) -> Hit:
    (number,) = hosts_of(stage.schedule, fault)
    host, others = stage.lab[number], [one for one in stage.lab if one is not stage.lab[number]]
    for other in others:
        host.lose(other)

    def lift() -> None:
        for other in others:
            host.find(other)

    return Hit(_victims_behind(stage, fault), lift)


def partial(stage: ChaosRun, fault: Fault) -> Hit:
    one, other = (stage.lab[number] for number in hosts_of(stage.schedule, fault))
    one.lose(other)
    other.lose(one)

    def lift() -> None:
        one.find(other)
        other.find(one)

    return Hit(_victims_behind(stage, fault), lift)


def slow(stage: ChaosRun, fault: Fault) -> Hit:
    host = stage.lab[fault.target % stage.schedule.hosts]
    host.set_rate(SLOW)
    return Hit(lift=lambda: host.set_rate(None))


def _victims_behind(stage: ChaosRun, fault: Fault) -> set[int]:
    hosts = hosts_of(stage.schedule, fault) if evicts(fault) else ()
    return {worker.pid for host in hosts for worker in stage.workers_on(host)}


# -- the disk --------------------------------------------------------------------------------------------------------


def fill_disk(stage: ChaosRun, _: Fault) -> Hit:
    filler = fill(stage.root(0) / _FILLER)
    return Hit(lift=lambda: filler.unlink(missing_ok=True))


# -- people ----------------------------------------------------------------------------------------------------------


def drain(stage: ChaosRun, fault: Fault) -> Hit:
    """One of the workers of host 0, by the number that its process has."""
    workers = stage.at_work()
    own = [worker for worker in workers if stage.host_of(worker.pid) == 0]
    if len(workers) < 2 or not own:
        return _nobody("worker that could be spared")
    pid = own[fault.target % len(own)].pid
    from paceline.control.journal.reader import RunReader

    with RunReader(stage.folder) as reader:
        member = next((row.member for row in reader.members() if row.pid == pid and not row.fate), None)
    if member is None:
        return _nobody("member of this worker")
    code, text = stage.ask("drain", member)
    if code != 0:
        raise ChaosTimeout(f"paceline drain failed (exit code {code}): {text.strip()}")
    stage.drained.add(pid)
    return Hit([pid])


def join(stage: ChaosRun, fault: Fault) -> Hit:
    stage.start_join(fault.target, stage.invite(), workers=1)
    return Hit()


def invite(stage: ChaosRun, fault: Fault) -> Hit:
    """Two use an invitation for one: one gets in, the other is told so."""
    code = stage.invite()
    both = [stage.start_join(fault.target, code, workers=1) for _ in range(2)]
    refused = stage.wait_until(lambda: [one for one in both if not one.is_alive], _GUEST_S, "one of two to be refused")
    for command in refused:
        command.expected = (2,)
        command.workers = 0
    return Hit()


# -- the end, and going on -------------------------------------------------------------------------------------------


def resume(stage: ChaosRun, _: Fault) -> Hit:
    victims = {worker.pid for worker in stage.living()}
    commands = [one for one in stage.commands if one.is_alive]
    code, text = stage.ask("stop")
    if code != 0:
        raise ChaosTimeout(f"paceline stop failed (exit code {code}): {text.strip()}")
    wait_ended(stage, commands, "paceline stop", (0,))
    victims |= stage.beats.look().keys()  # also those that made their first step meanwhile
    begin_again(stage)
    return Hit(victims)


def term(stage: ChaosRun, _: Fault) -> Hit:
    """As systemd, Slurm and `timeout` do it: every process at once."""
    victims = {worker.pid for worker in stage.living()}
    commands = [one for one in stage.commands if one.is_alive]
    before = _newest_checkpoint(stage)
    stage.send(signal.SIGTERM, *stage.processes())
    wait_ended(stage, commands, "SIGTERM to every process", (expecting.INTERRUPTED,))
    if _newest_checkpoint(stage) <= before:
        stage.violations.append("SIGTERM to every process: no checkpoint was written")
    victims |= stage.beats.look().keys()
    begin_again(stage)
    return Hit(victims)


def _newest_checkpoint(stage: ChaosRun) -> str:
    return next((found.path.name for found in names.find(stage.folder / names.FOLDER)), "")


def wait_ended(
    stage: ChaosRun, commands: list[Command], why: str, codes: tuple[int, ...], timeout_s: float = expecting.END_S
) -> None:
    for command in commands:
        command.expected = codes
    stage.wait_until(lambda: not any(one.is_alive for one in commands), timeout_s, f"the commands to end after {why}")
    stage.wait_until(lambda: not stage.processes(), 10.0, f"nothing to be left after {why}")


def begin_again(stage: ChaosRun) -> None:
    """Resume the run, with all hosts that it began with."""
    stage.drained.clear()
    stage.start_run(resume=True)
    let_join(stage)


def let_join(stage: ChaosRun) -> None:
    """The other hosts come as soon as the first one works."""
    if stage.schedule.hosts == 1:
        return
    began = time.monotonic()
    stage.wait_until(
        lambda: any(worker.steps and worker.steps[-1] > began for worker in stage.living()),
        expecting.START_S,
        "the first step of the run",
    )
    code = stage.invite(uses=stage.schedule.hosts - 1)
    for host in range(1, stage.schedule.hosts):
        stage.start_join(host, code, workers=stage.schedule.workers, servers=stage.schedule.servers_on(host))


ACT: dict[FaultKind, Callable[[ChaosRun, Fault], Hit]] = {
    FaultKind.KILL: kill,
    FaultKind.PAIR: pair,
    FaultKind.ALL: kill_all,
    FaultKind.STOP: stop,
    FaultKind.COORDINATOR: kill_coordinator,
    FaultKind.PAUSE: pause_coordinator,
    FaultKind.AGENT: kill_agent,
    FaultKind.HEAD: lose_head,
    FaultKind.LOADER: kill_loader,
    FaultKind.SERVER: kill_server,
    FaultKind.CUT: cut,
    FaultKind.ONEWAY: oneway,
    FaultKind.PARTIAL: partial,
    FaultKind.SLOW: slow,
    FaultKind.DISK: fill_disk,
    FaultKind.DRAIN: drain,
    FaultKind.JOIN: join,
    FaultKind.INVITE: invite,
    FaultKind.RESUME: resume,
    FaultKind.TERM: term,
}
