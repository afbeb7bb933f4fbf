"""``dear-train``: trains and tests one job."""
