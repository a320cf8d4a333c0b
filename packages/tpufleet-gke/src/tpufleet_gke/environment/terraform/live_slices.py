"""Slices in the cluster that Terraform does not manage: its plan does not show them."""

from __future__ import annotations

import json
import subprocess
from collections import Counter

from tpufleet.errors import FleetError
from tpufleet_gke.environment.config import capacity, names
from tpufleet_gke.environment.config.sections import Environment

TPU_MACHINES = ("ct", "tpu")  # what names of their machine types begin with


class LiveSlices(FleetError):
    """Deleting the cluster would end them, with their jobs; or it is not known."""


def check(environment: Environment) -> None:
    """Lists the VMs of node pools with gcloud, which `state_bucket` requires too."""
    own = {
        each
        for name, pool in environment.tpu_pools.items()
        if pool.managed_by == "terraform"
        for each in capacity.node_pool_names(name, pool)
    }
    cluster = names.cluster(environment)
    done = subprocess.run(
        ["gcloud", "compute", "instances", "list", f"--project={environment.project}", "--quiet",
         f"--filter=labels.goog-k8s-cluster-name={cluster} AND zone~{environment.region}",
         "--format=json(machineType,labels)"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise LiveSlices(
            f"cannot list the nodes of {cluster}; nothing was deleted\n  {done.stderr.strip()}\n"
            "  next: `gcloud auth login`, or ask for the role roles/compute.viewer on the project"
        )
    nodes = Counter(
        vm["labels"].get("goog-k8s-node-pool-name", "")
        for vm in json.loads(done.stdout)
        if vm["machineType"].rpartition("/")[2].startswith(TPU_MACHINES)
    )
    live = [
        f"  node pool {pool}, nodes: {nodes[pool]}\n" for pool in sorted(nodes) if pool not in own
    ]
    if live:
        raise LiveSlices(
            f"slices are live in {cluster}; nothing was deleted\n{''.join(live)}"
            "  next: end their jobs (`tpu cancel JOB`, `kubectl delete jobset NAME`); what stays, "
            f"`gcloud container node-pools delete POOL --cluster={cluster} "
            f"--region={environment.region} --project={environment.project}` deletes"
        )
