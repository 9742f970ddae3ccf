"""Retrieval sidecar: a Search-R1 compatible HTTP service over a passage corpus, and its client.

The server (``python -m retrieval_server``) needs fastapi, uvicorn, bm25s and orjson; the client
(``retrieval_server.client``) only httpx; the launcher (``retrieval_server.launch``) only the
standard library. Nothing here imports verl or torch.
"""
