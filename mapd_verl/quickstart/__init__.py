"""From nothing to a trained student and its report: the stages behind ``mapd quickstart``."""
