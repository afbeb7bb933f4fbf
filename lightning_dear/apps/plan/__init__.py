"""Says, as ``dear-plan``, which strategy would be fastest on a cluster."""
