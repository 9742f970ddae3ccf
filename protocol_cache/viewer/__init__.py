"""``mapd protocols view``: a local page to read protocols with their exploration log, and to review them."""
