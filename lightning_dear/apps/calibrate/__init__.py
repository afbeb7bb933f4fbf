"""``dear-plan calibrate``: what this cluster and a model take."""
