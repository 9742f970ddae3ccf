"""The agent's search client, from its config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mapd_verl.errors import UserError

if TYPE_CHECKING:
    from mapd_verl.agent.config import AgentConfig
    from retrieval_server.client import RetrievalClient


def make_client(config: AgentConfig) -> RetrievalClient:
    """A client of ``config.retriever_urls``; it retries within bounds and never raises for a failing service.

    Raises:
        UserError: if the config names no service, or a URL cannot be right.
    """
    from retrieval_server.client import RetrievalClient

    if not config.retriever_urls:
        raise UserError("mapd.agent.retriever_urls: no retrieval service named")
    try:
        return RetrievalClient(
            config.retriever_urls,
            topk=config.topk,
            timeout=config.retriever_timeout_s,
            retries=config.retriever_attempts - 1,
        )
    except ValueError as error:
        raise UserError(f"mapd.agent.retriever_urls: {error}") from error
