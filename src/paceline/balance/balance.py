"""The shares of a run: what is known of each worker's speed, how the batch is divided now, and when that changes.

    balance = balance.seated(seats, total, minimum)        for the workers of a plan; who is known keeps its pace
    balance = balance.observed(measures, total, minimum)   after every step, with what each worker wrote into the header

Both are pure, and every worker calls them with the same arguments after the same operation: the balance is a part of
the training state, and reaches newcomers and checkpoints with it.

A worker that was never measured is believed to be as fast as it was declared to be beside the others, as its own trial
of the model said, as the last worker on its host was, or as the others are: the first of these that there is.

Invariants
- The shares sum to the total; each worker gets at least the minimum, if there are enough samples.
- They change only where the step becomes shorter by more than can be noise, or where a worker cannot hold its part and
  others can take it without much delay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from paceline.balance.division import Pace, divide, finish_s, ideal_s
from paceline.balance.estimate import Estimate

_LEAST_GAIN = 0.02
_DOUBT = 3.0  # times the uncertainty of the slowest worker's pace: less gain than that may be none
_MEMORY = 16
_HEAVY_GAIN = 0.05  # by how much a run would be faster without a worker that is a burden
_HEAVY_STEPS = 10  # one after the other
_WORTH_FITTING = 1.25  # how much longer a step may be so that nobody has more samples than fit
_NOTABLE = 1.15  # a change of speed that is worth a word
_MAX_NAMED = 8


class Shares(NamedTuple):
    """How a global batch is divided, by rank. Within a generation the version tells divisions apart."""

    generation: int
    version: int
    parts: tuple[int, ...]


class StepTiming(NamedTuple):
    """What a worker says of a step: how long it was busy with how many samples, 0 if it was no usual step; how long it
    spent in the reduction of the step before; the most samples that fit, 0 for all."""

    samples: int
    busy_s: float
    reduced_s: float = 0.0
    limit: int = 0


class Seated(Protocol):
    """What is known of a worker before its first step: `capacity` as it was declared, beside the others, or 0; `tried`
    as its own trial said, the fixed time of a step and that of a sample, in seconds."""

    @property
    def member(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def capacity(self) -> float: ...
    @property
    def tried(self) -> tuple[float, float] | None: ...


class WorkerSpeed(msgspec.Struct, frozen=True, array_like=True):
    member: str
    host: str
    capacity: float  # beside the others, 0 if it was not declared
    hint: tuple[float, float] | None  # fixed and per sample, in seconds, before it was measured
    estimate: Estimate


class Balance(msgspec.Struct, frozen=True):
    """`reason` says why the shares were changed last. `burden` is a worker without which the run would be faster, and
    `why_burden` the figures."""

    workers: tuple[WorkerSpeed, ...] = ()
    shares: tuple[int, ...] = ()
    version: int = 0
    reason: str = ""
    exposed_s: float = 0.0  # of a step, in which nobody computes
    hosts: Mapping[str, tuple[float, float]] = {}  # the last pace of each host that had a worker
    num_heavy: int = 0
    burden: str = ""
    why_burden: str = ""

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(worker.member for worker in self.workers)

    # -- who takes part ----------------------------------------------------------------------------------------------

    def seated(self, seats: Sequence[Seated], total: int, minimum: int) -> Balance:
        """With these workers, in order of rank; itself if it has them."""
        if self.members == tuple(seat.member for seat in seats):
            return self
        known = {worker.member: worker for worker in self.workers}
        hosts = dict(self.hosts)
        for worker in self.workers:
            if worker.estimate.is_measured:
                hosts[worker.host] = worker.estimate.pace()[:2]
        workers = tuple(
            known.get(seat.member) or WorkerSpeed(seat.member, seat.host, seat.capacity, _hint(seat, hosts), Estimate())
            for seat in seats
        )
        paces = _paces(workers)
        return msgspec.structs.replace(
            self,
            workers=_settled(workers),
            shares=_division(total, paces, minimum),
            version=self.version + 1,
            hosts=hosts,
            num_heavy=0,
            burden="",
            why_burden="",
        )

    # -- a step ------------------------------------------------------------------------------------------------------

    def observed(self, measures: Sequence[StepTiming], total: int, minimum: int) -> Balance:
        """After a step; `measures` by rank."""
        workers = tuple(_seen(worker, measure) for worker, measure in zip(self.workers, measures, strict=True))
        new = msgspec.structs.replace(self, workers=workers, exposed_s=self._exposed(measures))
        if len(workers) == 1:
            return new
        paces = _paces(workers)
        if any(share and not worker.estimate.is_measured for worker, share in zip(workers, self.shares, strict=True)):
            return new._relieved(paces, total, minimum)
        return new._weighed(paces, total, minimum)._divided(paces, total, minimum)

    def _exposed(self, measures: Sequence[StepTiming]) -> float:
        """Who came last to a reduction waited for nobody in it."""
        reduced = [measure.reduced_s for measure in measures if measure.reduced_s > 0]
        if not reduced or not math.isfinite(least := min(reduced)):
            return self.exposed_s
        return least if not self.exposed_s else self.exposed_s + (least - self.exposed_s) / _MEMORY

    def _divided(self, paces: Sequence[Pace], total: int, minimum: int) -> Balance:
        """Anew, if that is worth it."""
        slowest = _slowest(paces, self.shares)
        now_s = paces[slowest].time_s(self.shares[slowest])
        doubt = max(_LEAST_GAIN, _DOUBT * self.workers[slowest].estimate.uncertainty())
        enough_s = doubt * (now_s + self.exposed_s)
        if now_s - ideal_s(total, paces) > enough_s:
            shares = _division(total, paces, minimum)
            if now_s - self._expected_s(paces, shares) > enough_s:
                return self._changed(paces, shares)
        return self._relieved(paces, total, minimum)

    def _expected_s(self, paces: Sequence[Pace], shares: Sequence[int]) -> float:
        """How long a step takes with other shares, where fewer samples save no more than is known for certain: a worker
        whose time hardly depends on its share is not helped by a smaller one."""
        times = []
        for worker, pace, now, then in zip(self.workers, paces, self.shares, shares, strict=True):
            if then < now and worker.estimate.is_measured:
                times.append(pace.time_s(now) - worker.estimate.cautious_slope() * (now - then))
            elif then:
                times.append(pace.time_s(then))
        return max(times)

    def _relieved(self, paces: Sequence[Pace], total: int, minimum: int) -> Balance:
        """Who has more than fits computes in pieces, which works, but only if need be."""
        if _is_overfull(paces, self.shares):
            shares = _division(total, paces, minimum)
            if not _is_overfull(paces, shares):
                return self._changed(paces, shares)
        return self

    def _changed(self, paces: Sequence[Pace], shares: tuple[int, ...]) -> Balance:
        return msgspec.structs.replace(
            self,
            workers=_settled(self.workers),
            shares=shares,
            version=self.version + 1,
            reason=_reason(self.workers, paces, self.shares, shares),
        )

    def _weighed(self, paces: Sequence[Pace], total: int, minimum: int) -> Balance:
        """Whether the slowest worker costs more than it gives. Who has more than the fewest samples gives something."""
        slowest = _slowest(paces, self.shares)
        now_s = paces[slowest].time_s(self.shares[slowest])
        without_s = 0.0
        is_heavy = self.shares[slowest] <= minimum
        if is_heavy:
            others = [pace for rank, pace in enumerate(paces) if rank != slowest]
            without_s = finish_s(others, divide(total, others, minimum))
            is_heavy = without_s + self.exposed_s < (1.0 - _HEAVY_GAIN) * (now_s + self.exposed_s)
        if not is_heavy:
            if not self.num_heavy:
                return self
            return msgspec.structs.replace(self, num_heavy=0, burden="", why_burden="")
        if self.num_heavy + 1 < _HEAVY_STEPS:
            return msgspec.structs.replace(self, num_heavy=self.num_heavy + 1)
        return msgspec.structs.replace(
            self,
            num_heavy=_HEAVY_STEPS,
            burden=self.workers[slowest].member,
            why_burden=f"it takes {_span(now_s)} for {self.shares[slowest]} of {total} samples, "
            f"the others alone {_span(without_s)} for all of them",
        )


def _hint(seat: Seated, hosts: Mapping[str, tuple[float, float]]) -> tuple[float, float] | None:
    if seat.capacity:
        return None
    return seat.tried or hosts.get(seat.host)


def _seen(worker: WorkerSpeed, measure: StepTiming) -> WorkerSpeed:
    estimate = worker.estimate.seen(measure.samples, measure.busy_s, measure.limit)
    if estimate is worker.estimate:
        return worker
    return msgspec.structs.replace(worker, estimate=estimate)


def _paces(workers: Sequence[WorkerSpeed]) -> list[Pace]:
    """Measured, or believed."""
    known = [_known_pace(worker) for worker in workers]
    whole = sorted(
        pace.per_sample_s * (worker.capacity or 1.0)
        for worker, pace in zip(workers, known, strict=True)
        if pace is not None
    )
    usual_s = whole[len(whole) // 2] if whole else 1.0  # of a worker with capacity 1
    return [
        pace if pace is not None else Pace(0.0, usual_s / (worker.capacity or 1.0), worker.estimate.limit)
        for worker, pace in zip(workers, known, strict=True)
    ]


def _known_pace(worker: WorkerSpeed) -> Pace | None:
    if worker.estimate.is_measured:
        return worker.estimate.pace()
    return Pace(*worker.hint, worker.estimate.limit) if worker.hint is not None else None


def _settled(workers: Sequence[WorkerSpeed]) -> tuple[WorkerSpeed, ...]:
    return tuple(msgspec.structs.replace(worker, estimate=worker.estimate.settled()) for worker in workers)


def _slowest(paces: Sequence[Pace], shares: Sequence[int]) -> int:
    return max(range(len(paces)), key=lambda rank: paces[rank].time_s(shares[rank]))


def _division(total: int, paces: Sequence[Pace], minimum: int) -> tuple[int, ...]:
    """So that nobody has more than fits, unless that makes the step much longer: who has more computes in pieces."""
    fitting = divide(total, paces, minimum)
    if not any(pace.limit for pace in paces):
        return fitting
    free = divide(total, [pace._replace(limit=0) for pace in paces], minimum)
    return fitting if finish_s(paces, fitting) <= _WORTH_FITTING * finish_s(paces, free) else free


def _is_overfull(paces: Sequence[Pace], shares: Sequence[int]) -> bool:
    return any(0 < pace.limit < share for pace, share in zip(paces, shares, strict=True))


def _reason(workers: Sequence[WorkerSpeed], paces: Sequence[Pace], before: Sequence[int], after: Sequence[int]) -> str:
    """What became of the shares, and why: by the times that the change was decided with."""
    return f"{_listed(before)} became {_listed(after)}: {_cause(workers, paces, before, after)}"


def _cause(workers: Sequence[WorkerSpeed], paces: Sequence[Pace], before: Sequence[int], after: Sequence[int]) -> str:
    """The step was as long as its slowest worker, which gets less; of the others, the one with the most to gain gets
    most of that."""
    overfull = [rank for rank, pace in enumerate(paces) if after[rank] <= pace.limit < before[rank]]
    if overfull:
        rank = max(overfull, key=lambda rank: before[rank] / paces[rank].limit)
        return f"{workers[rank].member} has memory for {paces[rank].limit} samples at a time"
    late = _slowest(paces, before)
    early = max(range(len(paces)), key=lambda rank: (after[rank] - before[rank], -paces[rank].time_s(before[rank])))
    slower, faster = workers[late].estimate.change, 1.0 / workers[early].estimate.change
    if slower > max(_NOTABLE, faster):
        return f"{workers[late].member} takes {slower:.1f}x longer than before"
    if faster > _NOTABLE:
        return f"{workers[early].member} is {faster:.1f}x as fast as before"
    took = [f"{_span(paces[rank].time_s(before[rank]))} for {before[rank]} samples" for rank in (late, early)]
    return f"{workers[late].member} takes {took[0]}, {workers[early].member} {took[1]}"


def _listed(shares: Sequence[int]) -> str:
    listed = ":".join(map(str, shares[:_MAX_NAMED]))
    return listed if len(shares) <= _MAX_NAMED else f"{listed}:... ({len(shares)} shares)"


def _span(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
