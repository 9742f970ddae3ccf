"""Questions, corpora and the datasets the trainer reads."""
