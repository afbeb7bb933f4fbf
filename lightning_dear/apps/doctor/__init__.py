"""``dear-train doctor=true``: checks whether a cluster is fit for a job."""
