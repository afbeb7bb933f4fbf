"""``dear-plan``: predicts which strategy would be fastest on a cluster."""
