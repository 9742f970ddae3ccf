"""What was learnt: episodes on held-out questions, intervals, curves and the report."""
