"""Every strategy keeps the contract."""

from __future__ import annotations

from paceline.testing.contracts.strategy import StrategyContract


class TestAllReduce(StrategyContract):
    strategy = "allreduce"


class TestServer(StrategyContract):
    strategy = "server"
    num_servers = 2


class TestServerByLeases(StrategyContract):
    strategy = "server"
    consistency = "bounded:0"
    num_servers = 2


class TestHybrid(StrategyContract):
    strategy = "hybrid"
    num_servers = 2
