"""A training, a server or a user's program as a cluster's job: for SLURM, Kubernetes, or hosts over ssh.

The texts are templates in `templates/`; each module fills one.
"""

from shardwise.interop.jobs.job import ClusterJob, JobFile, JobOptions
from shardwise.interop.jobs.writers import SYSTEMS, write_job

__all__ = ["SYSTEMS", "ClusterJob", "JobFile", "JobOptions", "write_job"]
