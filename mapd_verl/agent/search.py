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


def check_service(config: AgentConfig) -> None:
    """One query to each service of ``config``, before a run that would fail without it.

    Raises:
        UserError: naming the URL and what is wrong with it.
    """
    import asyncio
    from dataclasses import replace

    async def ask(url: str) -> None:
        async with make_client(replace(config, retriever_urls=(url,))) as client:
            result = await client.search("Is anybody there?")
        if not result.ok:
            raise UserError(f"retrieval service: {result.error}: {result.detail}")

    async def ask_all() -> None:
        make_client(config)  # no service named is an error too
        for url in config.retriever_urls:
            await ask(url)

    asyncio.run(ask_all())
