"""The cost model that the members of a group come to when it forms, by the real words and the real rule.

Survivors bring models of earlier groups, and not all of them the same; a newcomer brings none. Members that choose by
different models would do different things under the same name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.collective.agreement import Course, decode_model, encode_model, fits, word_of
from paceline.collective.choice import CostModel, candidates
from paceline.control.messages.plan import Plan
from paceline.testing.joint.truth import Violation

if TYPE_CHECKING:
    from paceline.testing.joint.workers import SimulatedWorker
    from paceline.testing.joint.world import World


class ModelAgreement:
    def __init__(self, world: World, plan: Plan) -> None:
        self._world = world
        self._plan = plan
        hosts: dict[str, list[int]] = {}
        for rank, seat in enumerate(plan.seats):
            hosts.setdefault(seat.card.host, []).append(rank)
        self._hosts = list(hosts.values())
        self._names = candidates(self._hosts)
        self._models: dict[str, CostModel | None] = {}

    def settle(self) -> None:
        """All members have come: each has said its word, and sees the largest of all, place by place."""
        if len(self._names) == 1:
            return  # one host: there is nothing to choose
        mutation, members = self._world.mutation, self._plan.members
        own = {name: self._model_of(name) for name in members}
        encoded = [encode_model(model) if model is not None else None for model in own.values()]
        words = [word_of(rank, len(members), data) for rank, data in enumerate(encoded)]
        largest = [max(places) for places in zip(*words, strict=True)]
        for name in members:
            course, source, num_bytes = mutation.agrees(largest, len(members))
            if course is Course.PROBE:
                seconds = float(self._plan.generation)  # another measurement, another result
                self._models[name] = CostModel(dict.fromkeys(self._names, ((1, seconds),)))
            elif course is Course.TAKE:
                shown = encoded[source]
                if shown is None or len(shown) != num_bytes:
                    raise Violation(f"rank {source} of generation {self._plan.generation} has no model to show")
                self._models[name] = decode_model(shown, self._names)
            else:
                self._models[name] = own[name]

    def _model_of(self, name: str) -> CostModel | None:
        model = self._world.workers[name].models.get(self._hosts)
        return model if model is not None and fits(model, self._names) else None

    def formed(self, worker: SimulatedWorker) -> None:
        if (model := self._models.get(worker.name)) is not None:
            worker.models.put(model)

    def check(self) -> None:
        """Before anything is reduced."""
        found = list(self._models.values())
        if any(model is None or model != found[0] for model in found):
            raise Violation(f"members of generation {self._plan.generation} choose by different models: {found}")
