"""``dear-plan``: which strategy would be fastest on a cluster, and what to measure of it."""
