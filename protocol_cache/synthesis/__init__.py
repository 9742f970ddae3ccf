"""The multi-agent team that answers a question and leaves a protocol (arXiv 2607.24280)."""
