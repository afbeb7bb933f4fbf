"""``dear-plan calibrate``: measures this cluster's links and a model's step."""
