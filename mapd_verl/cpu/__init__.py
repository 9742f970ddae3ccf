"""The embedded default for machines without an accelerator; nothing here changes a GPU run."""
