"""Indexes on disk: built once by ``python -m retrieval_server build``, mapped into memory when served."""
