"""verl's router for servers in one small process.

The stock one lives in a module that imports all of verl: ten seconds of start and 0.3 GB for two counters.
``router.yaml`` beside this file names the class to verl (``rollout.router_config_path``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: Trajectories whose server is remembered; the oldest is forgotten.
MAX_REMEMBERED = 10_000


class StickyRouter:
    """Sends every turn of a trajectory to the same server (its prefix is cached there), new ones to the idlest.

    The methods are those of verl's ``RequestLoadBalancer`` protocol.
    """

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any] | None = None):
        self._servers = dict(servers)
        self._inflight = dict.fromkeys(self._servers, 0)
        self._sticky: dict[str, str] = {}

    def acquire_server(self, request_id: str) -> tuple[str, Any]:
        """The server for a request, counted as in flight until ``release_server``.

        Raises ``RuntimeError`` if there is none (verl's asynchronous client waits on this very text).
        """
        if not self._servers:
            raise RuntimeError("No available servers in load balancer")
        server_id = self._sticky.pop(request_id, None)
        if server_id not in self._servers:
            server_id = min(self._inflight, key=lambda name: self._inflight[name])
        self._sticky[request_id] = server_id
        if len(self._sticky) > MAX_REMEMBERED:
            del self._sticky[next(iter(self._sticky))]
        self._inflight[server_id] += 1
        return server_id, self._servers[server_id]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """A request is done; a server that was removed meanwhile is nobody's concern."""
        if server_id in self._inflight:
            self._inflight[server_id] -= 1

    def require_acquire_fields(self) -> list[str]:
        """Routing looks at the request id alone."""
        return []

    def require_release_fields(self) -> list[str]:
        """Counting looks at the server id alone."""
        return []

    def add_servers(self, servers: Mapping[str, Any]) -> None:
        """More servers for new trajectories."""
        self._servers.update(servers)
        for name in servers:
            self._inflight.setdefault(name, 0)

    def remove_servers(self, server_ids: Iterable[str]) -> None:
        """Their trajectories move on to others."""
        for name in server_ids:
            self._servers.pop(name, None)
            self._inflight.pop(name, None)

    def get_all_servers(self) -> list[str]:
        """Ids of the servers."""
        return list(self._servers)

    def get_status(self) -> dict[str, Any]:
        """Requests in flight by server, and in all."""
        return {
            "servers": dict(self._inflight),
            "total_inflight": self.get_total_inflight(),
            "active_servers": len(self._servers),
        }

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Forget which trajectory went where."""
        cleared = len(self._sticky)
        self._sticky.clear()
        return {"cleared_entries": cleared, "server_loads": dict(self._inflight)}

    def get_total_inflight(self) -> int:
        """Requests in flight."""
        return sum(self._inflight.values())
