"""Tells, as ``dear-train doctor=true``, whether a cluster is fit for a job."""
